"""Define every exception that volseg raises on purpose.

::

    VolsegError
    ├── ConfigError (ValueError)            a config that cannot be run as written
    ├── DataError (ValueError)              a task folder, case or split that cannot be trained on
    │   └── ReaderError                     a file that cannot be read as an image
    │       ├── DamagedFileError            a file that ends early, or whose bytes do not fit its header or checksum
    │       └── LargeVolumeError            a volume that needs more memory than is free
    ├── GridError (ValueError)              a volume with sides that a network or transform does not support
    ├── BatchFieldError (KeyError)          a field that a named module needs and the batch lacks, or the reverse
    ├── CheckpointError (RuntimeError)      a checkpoint that is absent, damaged or of another run
    ├── NonFiniteLossError (ArithmeticError) training diverged
    ├── NonFinitePredictionError (ArithmeticError) a model returned probabilities that are not finite
    ├── FollowError (RuntimeError)          a step that cannot be followed without a GPU
    ├── OutOfMemoryError (MemoryError)      a batch or a volume that does not fit into the device's memory
    └── ParallelError (RuntimeError)        devices, processes or shards that do not fit together
        ├── NotRecordedError                a step that cannot be recorded as a CUDA graph
        ├── UnsupportedOperatorError (NotImplementedError)  a torch function without a sharded form
        ├── PartitionError (ValueError)     a module that cannot be cut as requested
        └── PlacementError                  an illegal move of a placed module

Each error is also the builtin in brackets, so callers need not import this module to catch it.
A message states what was required, what was found, and how to fix it.
"""


class VolsegError(Exception):
    """Base of every error that volseg raises on purpose."""

    # KeyError prints the repr of its argument; print the sentence instead.
    def __str__(self) -> str:
        return Exception.__str__(self)


class ConfigError(VolsegError, ValueError):
    """A config that cannot be run as written."""


class DataError(VolsegError, ValueError):
    """A task folder, case or split that cannot be trained on."""


class ReaderError(DataError):
    """A file that cannot be read as an image."""


class DamagedFileError(ReaderError):
    """A file that is truncated, or whose bytes do not match its header or checksum."""


class LargeVolumeError(ReaderError):
    """A volume that needs more memory than is free."""


class GridError(VolsegError, ValueError):
    """A volume with sides that a network or transform does not support."""


class BatchFieldError(VolsegError, KeyError):
    """A field that a named module needs and the batch lacks, or an output without a name."""


class CheckpointError(VolsegError, RuntimeError):
    """A checkpoint that is absent, damaged, or of another run."""


class NonFiniteLossError(VolsegError, ArithmeticError):
    """Training diverged: the loss is not a finite number."""


class NonFinitePredictionError(VolsegError, ArithmeticError):
    """A model returned probabilities that are not finite numbers."""


class FollowError(VolsegError, RuntimeError):
    """A step that cannot run on fake tensors, so that its memory and time cannot be estimated."""


class OutOfMemoryError(VolsegError, MemoryError):
    """A batch or a volume that does not fit into the device's memory."""


class ParallelError(VolsegError, RuntimeError):
    """Devices, processes or shards that do not fit together."""


class NotRecordedError(ParallelError):
    """A step that cannot be captured as a CUDA graph; it still runs, kernel by kernel."""


class UnsupportedOperatorError(ParallelError, NotImplementedError):
    """A torch function without a sharded implementation."""


class PartitionError(ParallelError, ValueError):
    """A module that cannot be partitioned as requested."""


class PlacementError(ParallelError):
    """An illegal move of a module whose parameters are placed on devices."""


__all__ = sorted(name for name in dict(globals()) if name.endswith("Error"))
