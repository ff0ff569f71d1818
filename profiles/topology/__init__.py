"""What people have of their machines (matrices, XML, logs, lists, other tools' files) to Readings.

One reader a format; `recognise.read_topology` finds the reader by content. Names of devices and
figures are the catalogue's; nothing that a file does not say is filled in.
"""
