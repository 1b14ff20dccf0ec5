from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Numbers(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FLOAT32: _ClassVar[Numbers]
    BFLOAT16: _ClassVar[Numbers]

class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NONE: _ClassVar[Verdict]
    APPLIED: _ClassVar[Verdict]
    STALE: _ClassVar[Verdict]
    REPEATED: _ClassVar[Verdict]
    ANEW: _ClassVar[Verdict]
FLOAT32: Numbers
BFLOAT16: Numbers
NONE: Verdict
APPLIED: Verdict
STALE: Verdict
REPEATED: Verdict
ANEW: Verdict

class Board(_message.Message):
    __slots__ = ("pid", "fd", "name")
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    pid: int
    fd: int
    name: str
    def __init__(self, pid: _Optional[int] = ..., fd: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class MeetRequest(_message.Message):
    __slots__ = ("protocol", "worker", "sequence", "epoch", "version", "norm", "numbers", "gradient", "pull", "buffers", "board")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    BOARD_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    worker: str
    sequence: int
    epoch: str
    version: int
    norm: float
    numbers: Numbers
    gradient: bytes
    pull: bool
    buffers: bytes
    board: Board
    def __init__(self, protocol: _Optional[int] = ..., worker: _Optional[str] = ..., sequence: _Optional[int] = ..., epoch: _Optional[str] = ..., version: _Optional[int] = ..., norm: _Optional[float] = ..., numbers: _Optional[_Union[Numbers, str]] = ..., gradient: _Optional[bytes] = ..., pull: bool = ..., buffers: _Optional[bytes] = ..., board: _Optional[_Union[Board, _Mapping]] = ...) -> None: ...

class MeetReply(_message.Message):
    __slots__ = ("verdict", "version", "staleness", "epoch", "weights", "buffers")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    verdict: Verdict
    version: int
    staleness: int
    epoch: str
    weights: bytes
    buffers: bytes
    def __init__(self, verdict: _Optional[_Union[Verdict, str]] = ..., version: _Optional[int] = ..., staleness: _Optional[int] = ..., epoch: _Optional[str] = ..., weights: _Optional[bytes] = ..., buffers: _Optional[bytes] = ...) -> None: ...

class LookRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LookReply(_message.Message):
    __slots__ = ("version", "staleness", "stale", "refused")
    class StalenessEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    version: int
    staleness: _containers.ScalarMap[int, int]
    stale: int
    refused: int
    def __init__(self, version: _Optional[int] = ..., staleness: _Optional[_Mapping[int, int]] = ..., stale: _Optional[int] = ..., refused: _Optional[int] = ...) -> None: ...

class CopyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DismissRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DismissReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadReply(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    def __init__(self, epoch: _Optional[str] = ...) -> None: ...

class State(_message.Message):
    __slots__ = ("version", "tensors", "staleness", "stale", "refused", "sequences", "buffers")
    class StalenessEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class SequencesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    version: int
    tensors: bytes
    staleness: _containers.ScalarMap[int, int]
    stale: int
    refused: int
    sequences: _containers.ScalarMap[str, int]
    buffers: bytes
    def __init__(self, version: _Optional[int] = ..., tensors: _Optional[bytes] = ..., staleness: _Optional[_Mapping[int, int]] = ..., stale: _Optional[int] = ..., refused: _Optional[int] = ..., sequences: _Optional[_Mapping[str, int]] = ..., buffers: _Optional[bytes] = ...) -> None: ...
