"""What `volseg doctor` finds out of a machine, and what it says of it.

Facts are gathered by processes of their own (`gatherers`), each with a time limit, so that a broken driver, a hanging
disk or a torch that cannot be imported is told of as anything else is. What facts mean is said by pure functions
(`checks`), which constructed bad machines try. This package imports no torch: only what it starts does.
"""
