"""Imported by multiprocessing's fork server alone: loads everything once, then each rank is a fork of it.

Never import this module elsewhere: it detaches the process from its terminal.
"""

from __future__ import annotations

import os

from gpt3d.launch.preload import import_all, prepare_deepspeed
from gpt3d.launch.rank import die_with_parent

os.setsid()  # Ctrl-C and signals to the terminal's group are for the supervisor, which then tells the ranks
die_with_parent()
prepare_deepspeed("cpu")
import_all()
