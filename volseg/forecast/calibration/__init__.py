"""How fast this machine is: what is timed, how, and where it is kept."""
