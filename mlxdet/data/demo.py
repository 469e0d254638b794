"""The embedded corpus: the Python language reference that every interpreter carries, `pydoc_data.topics`.

About 700 kB of English prose with code in it, so that a first run needs neither a file nor a network. The text is the
interpreter's own: it differs between Python versions, and so does the digest of the corpus.
"""

import platform

from mlxdet.errors import UsageError

NAME = "pydoc_data.topics"


def demo_text() -> bytes:
    """Return the topics in the order of their names, joined by newlines, as UTF-8. Raises UsageError without them."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some systems ship Python without it
        raise UsageError("this Python has no pydoc_data.topics, the embedded text; name a text with --data") from None
    return "\n".join(topics[name] for name in sorted(topics)).encode("utf-8")


def demo_note() -> dict[str, str]:
    """Return what describe() adds for this corpus: its name and the Python version that decides its content."""
    return {"embedded": NAME, "python": platform.python_version()}
