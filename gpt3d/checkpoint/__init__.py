"""Checkpoints: sharded, asynchronous, atomic, valid in any layout.

A checkpoint is a folder `step-00000100` with, for every canonical parameter, its fp32 weight and both Adam moments at
their global shape, cut into whatever pieces the ranks owned when it was saved:

    rank00000.bin ...   the numbers, raw
    index.json          which file holds which piece of which tensor; a checksum for each MiB of each file
    state.json          step, consumed samples, configuration, data fingerprint, layout, versions, wall time
    summary.txt         the same for people
    COMMITTED           sizes and checksums of the three above; written last

pieces.py (geometry), planner.py and storage.py (torch's distributed-checkpoint protocol), folder.py (names, commit,
retention), lock.py (one run in a folder) and settings.py (what may change at resume) know nothing of each other's
work; checkpointer.py joins them.
"""
