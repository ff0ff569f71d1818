"""Which operators of a block to divide over ranks, exactly; begin with `choice`.

`graph` is a block's data flow and `states` how ranks hold a tensor. `axes` and `views` say how an
operator runs divided, `ways` lists its ways, `costs` prices them and `program` finds the cheapest.
`choice` tells it in parameters and lines, `report` prints it beside the template.
"""
