"""The processes of a job: how they start, meet, watch each other, and tell which of them failed first.

=============== =======================================================================
launcher        starts one process per device, by torch's elastic launcher
workers         starts processes that each do work of their own, one per GPU
rendezvous      agrees on which processes belong to this attempt
group           joins and leaves torch's process group
progress        where this process is in its work
supervision     each process watches all of them
progress_sync   long work of every process, while the others hear how far it is
first_error     the error that the job reports, and the end of a process
=============== =======================================================================

What a launcher tells a process (`volseg.launched`) and how long that lives (`volseg.lifetime`) is known before torch
is imported, and therefore lies outside of this package.
"""
