"""Diagnose a machine for `volseg doctor`: gather facts, and derive findings from them.

Separate processes gather facts (`gatherers`, `trials`), each with a time limit, so that a broken driver, a hanging disk
or a torch that cannot be imported is reported like any other fault. Pure functions derive findings (`gpu_checks`,
`machine_checks`); tests run them on constructed bad machines. Only the started processes import torch.
"""
