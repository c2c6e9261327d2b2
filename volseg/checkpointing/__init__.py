"""Write and read checkpoints, keep the files of a run folder, and check that a run may resume.

Read in this order:

=================  =================================================================================================
module             content
=================  =================================================================================================
``state``          the content of a checkpoint
``file``           ``latest.pt``, ``previous.pt``, ``best.pt``: written atomically, read without running code; loads a
                   state into network, optimizer, average, scaler and generators; copies a state before writing it
``compatible``     the rules on differences between a run and its continuation, and their checks
``components``     the record of the user's components
``folder``         the files of a run folder
``job_folder``     which process of a job writes the run folder, its lock, and whether the run resumes
=================  =================================================================================================

The first two are independent of configs; `volseg.workflow` uses them. The others belong to runs from a config.
`volseg.workflow.Checkpoints` decides when a training is saved.
"""
