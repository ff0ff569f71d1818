"""The command line and everything people look at: tables, JSON, Perfetto traces."""
