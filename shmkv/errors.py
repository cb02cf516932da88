"""The error family. Each error says what happened, what did not change, and which knob to turn (`hint`).

Three words keep blame apart: *closed* means by us, *dead* means a peer, *broken* means the segment.
A look-up that finds nothing is no error: it returns a falsy `Miss`.
"""


class ShmkvError(Exception):
    """Base of every error that this package raises. `hint` names the knob to turn."""

    hint = ""

    def __init__(self, message: str = "", *, hint: str = ""):
        super().__init__(message)
        self.hint = hint or type(self).hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} [{self.hint}]" if self.hint else message


# ---------------------------------------------------------------- what the caller passed

class InvalidArgument(ShmkvError, ValueError):
    """An argument was refused before anything was changed."""


class InvalidName(InvalidArgument):
    """A segment name that cannot be a name."""

    hint = "use 1 to 180 of the characters A-Z a-z 0-9 . _ - and start with a letter or digit"


class InvalidTokens(InvalidArgument):
    """Token ids (or a roi mask) that cannot be taken exactly."""

    hint = "pass integers from 0 to 4294967295 as list, tuple, range, NumPy or torch integers"


class InvalidNamespace(InvalidArgument):
    """A namespace value that has no canonical encoding."""

    hint = "use str keys; str, bytes, int, float, bool, None, or lists and mappings of these as values, or str(value)"


class InvalidTensor(InvalidArgument):
    """A tensor, tensor name or tensor spec that cannot be carried bit for bit."""


# ---------------------------------------------------------------- how a handle may be used

class ClosedError(ShmkvError):
    """The handle, hit or reserved entry was closed, released or sealed by us before this call."""


class InheritedHandle(ShmkvError):
    """A forked child used its parent's handle. The parent is not affected."""

    hint = "call shmkv.attach(name) in the child"


class ReentryError(ShmkvError):
    """This thread is already inside the segment's lock (a signal handler or finaliser called back in)."""

    hint = "do not call shmkv from signal handlers or finalisers"


# ---------------------------------------------------------------- the segment

class NoSuchSegment(ShmkvError, FileNotFoundError):
    """No segment of this name is on this host (or not in this container's /dev/shm)."""

    hint = "is the creator up? attach(name, timeout=60) waits for it; containers share /dev/shm with --ipc"


class SegmentExists(ShmkvError, FileExistsError):
    """The name is taken. The existing segment was not touched."""

    hint = "attach() to it, pass exist_ok=True (it becomes yours if its owner is dead), or choose another name"


class NotOurs(ShmkvError, PermissionError):
    """The object belongs to another user, is open to others, or is not a plain file."""

    hint = "only a regular file of mode 0600 owned by this user is attached to"


class FormatMismatch(ShmkvError):
    """The segment was written by another format of this library."""

    hint = "run the same shmkv version in all processes of one segment"


class SegmentBroken(ShmkvError):
    """The segment's bytes contradict its own layout. Nothing was read beyond its bounds."""

    hint = "create a new segment; keep this one's bytes for a post-mortem"


class StorageFull(ShmkvError, OSError):
    """/dev/shm (or the cgroup) cannot hold the segment. Nothing was left behind."""

    hint = "lower capacity=, or raise docker --shm-size / the pod's emptyDir sizeLimit / the memory limit"


# ---------------------------------------------------------------- running out, running late

class TooLarge(ShmkvError):
    """The entry can never fit, not even into the empty buffer. Nothing was changed."""

    hint = "raise capacity= (payload) or meta_capacity= (tokens, names) in shmkv.create()"


class ArenaFull(ShmkvError):
    """The entry does not fit now. Nothing was changed."""

    hint = 'raise capacity= or timeout=, release hits sooner, or use on_full="evict"'


class TableFull(ShmkvError):
    """A table of fixed size (slots, leases, peers, waits) has no free record. Nothing was changed."""

    hint = "raise slots=, leases=, peers= or waits= in shmkv.create()"


class TimedOut(ShmkvError, TimeoutError):
    """The deadline passed. Nothing was changed."""

    hint = "raise timeout=, or look who waits for whom with buffer.stats()"


class Cancelled(ShmkvError):
    """The entry in flight was cancelled by cancel(); its bytes are free again."""

    hint = "somebody no longer wants this entry: do not insert it again unasked"


class TransportUnavailable(ShmkvError):
    """No transport can carry this tensor to where it is wanted. No byte was moved."""
