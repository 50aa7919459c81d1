"""A helper process that tokenizes pieces: `python -m gpt3d.data.helper`.

It reads pickled pieces from its standard input and answers on its standard output. It imports neither torch nor the
caller's main module, so it starts fast, stays small, and ends with its parent.
"""

from __future__ import annotations

import os
import pickle
import sys

from gpt3d.data.worker import Outcome, Step, tokenize_piece


def main() -> None:
    """Serve pieces until the parent closes the pipe."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not get among the answers

    def send(message: Step | Outcome) -> None:
        pickle.dump(message, answers)
        answers.flush()

    try:
        job = pickle.load(sys.stdin.buffer)
        while True:
            number, piece = pickle.load(sys.stdin.buffer)
            send(tokenize_piece(job, number, piece, send))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return


if __name__ == "__main__":
    main()
