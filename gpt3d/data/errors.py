"""The one exception of the data pipeline."""


class DataError(ValueError):
    """What a user can cause with a corpus, a tokenizer or a data setting; the message says what to do."""

    show_traceback = False
