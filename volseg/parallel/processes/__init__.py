"""Processes of a job: start, rendezvous, supervision, and the first error.

=============== ======================================================================================
launcher        starts one process per device, by torch's elastic launcher
workers         starts independent processes, one per GPU
rendezvous      agrees on the processes of this attempt
group           joins and leaves torch's process group
progress        records the position of this process in its work; runs long work while ranks exchange theirs
supervision     each process watches all of them
first_error     the error that the job reports, and the end of a process
=============== ======================================================================================

What a launcher passes to a process (`volseg.launched`) and the lifetime of a process (`volseg.lifetime`) are needed
before torch is imported, so these modules are outside this package.
"""
