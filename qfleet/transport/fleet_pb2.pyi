from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNKNOWN: _ClassVar[Verdict]
    TAKEN: _ClassVar[Verdict]
    WAIT: _ClassVar[Verdict]
    STOP: _ClassVar[Verdict]
UNKNOWN: Verdict
TAKEN: Verdict
WAIT: Verdict
STOP: Verdict

class ProveRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProveReply(_message.Message):
    __slots__ = ("challenge", "proofs")
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    PROOFS_FIELD_NUMBER: _ClassVar[int]
    challenge: str
    proofs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, challenge: _Optional[str] = ..., proofs: _Optional[_Iterable[str]] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("protocol", "version", "torch", "python", "name", "role", "host", "pid", "session", "claim", "again")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TORCH_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    version: str
    torch: str
    python: str
    name: str
    role: str
    host: str
    pid: int
    session: str
    claim: str
    again: bool
    def __init__(self, protocol: _Optional[int] = ..., version: _Optional[str] = ..., torch: _Optional[str] = ..., python: _Optional[str] = ..., name: _Optional[str] = ..., role: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., session: _Optional[str] = ..., claim: _Optional[str] = ..., again: bool = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("index", "incarnation", "epoch", "config_yaml", "spec_json", "actors", "steps", "updates", "version", "max_message_bytes", "elsewhere", "memory", "redirect_port")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONFIG_YAML_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    ACTORS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    REDIRECT_PORT_FIELD_NUMBER: _ClassVar[int]
    index: int
    incarnation: int
    epoch: str
    config_yaml: str
    spec_json: str
    actors: int
    steps: int
    updates: int
    version: int
    max_message_bytes: int
    elsewhere: int
    memory: bytes
    redirect_port: int
    def __init__(self, index: _Optional[int] = ..., incarnation: _Optional[int] = ..., epoch: _Optional[str] = ..., config_yaml: _Optional[str] = ..., spec_json: _Optional[str] = ..., actors: _Optional[int] = ..., steps: _Optional[int] = ..., updates: _Optional[int] = ..., version: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., elsewhere: _Optional[int] = ..., memory: _Optional[bytes] = ..., redirect_port: _Optional[int] = ...) -> None: ...

class ExchangeRequest(_message.Message):
    __slots__ = ("epoch", "index", "incarnation", "sequence", "steps", "total_steps", "version", "parcels", "episodes", "figures", "counters", "judgements", "leaving", "part", "session", "memory")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PARCELS_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    JUDGEMENTS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    index: int
    incarnation: int
    sequence: int
    steps: int
    total_steps: int
    version: int
    parcels: _containers.RepeatedCompositeFieldContainer[Parcel]
    episodes: _containers.RepeatedCompositeFieldContainer[Episode]
    figures: _containers.RepeatedCompositeFieldContainer[Figure]
    counters: _containers.RepeatedCompositeFieldContainer[Counter]
    judgements: _containers.RepeatedCompositeFieldContainer[Judgement]
    leaving: bool
    part: Part
    session: str
    memory: bytes
    def __init__(self, epoch: _Optional[str] = ..., index: _Optional[int] = ..., incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., steps: _Optional[int] = ..., total_steps: _Optional[int] = ..., version: _Optional[int] = ..., parcels: _Optional[_Iterable[_Union[Parcel, _Mapping]]] = ..., episodes: _Optional[_Iterable[_Union[Episode, _Mapping]]] = ..., figures: _Optional[_Iterable[_Union[Figure, _Mapping]]] = ..., counters: _Optional[_Iterable[_Union[Counter, _Mapping]]] = ..., judgements: _Optional[_Iterable[_Union[Judgement, _Mapping]]] = ..., leaving: bool = ..., part: _Optional[_Union[Part, _Mapping]] = ..., session: _Optional[str] = ..., memory: _Optional[bytes] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("save", "state", "segments")
    SAVE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    save: int
    state: bytes
    segments: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, save: _Optional[int] = ..., state: _Optional[bytes] = ..., segments: _Optional[_Iterable[str]] = ...) -> None: ...

class Parcel(_message.Message):
    __slots__ = ("chunk", "priority")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    priority: bytes
    def __init__(self, chunk: _Optional[bytes] = ..., priority: _Optional[bytes] = ...) -> None: ...

class Episode(_message.Message):
    __slots__ = ("lane", "ret", "length", "info")
    LANE_FIELD_NUMBER: _ClassVar[int]
    RET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    lane: int
    ret: float
    length: int
    info: _containers.RepeatedCompositeFieldContainer[Figure]
    def __init__(self, lane: _Optional[int] = ..., ret: _Optional[float] = ..., length: _Optional[int] = ..., info: _Optional[_Iterable[_Union[Figure, _Mapping]]] = ...) -> None: ...

class Figure(_message.Message):
    __slots__ = ("tag", "sum", "count")
    TAG_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    tag: str
    sum: float
    count: int
    def __init__(self, tag: _Optional[str] = ..., sum: _Optional[float] = ..., count: _Optional[int] = ...) -> None: ...

class Counter(_message.Message):
    __slots__ = ("tag", "by")
    TAG_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    tag: str
    by: int
    def __init__(self, tag: _Optional[str] = ..., by: _Optional[int] = ...) -> None: ...

class Judgement(_message.Message):
    __slots__ = ("returns", "lengths", "version", "weights", "seconds", "info")
    RETURNS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    returns: _containers.RepeatedScalarFieldContainer[float]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    version: int
    weights: bytes
    seconds: float
    info: _containers.RepeatedCompositeFieldContainer[Figure]
    def __init__(self, returns: _Optional[_Iterable[float]] = ..., lengths: _Optional[_Iterable[int]] = ..., version: _Optional[int] = ..., weights: _Optional[bytes] = ..., seconds: _Optional[float] = ..., info: _Optional[_Iterable[_Union[Figure, _Mapping]]] = ...) -> None: ...

class ExchangeReply(_message.Message):
    __slots__ = ("verdict", "version", "steps", "updates", "wanted", "elsewhere", "save", "saved")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    verdict: Verdict
    version: int
    steps: int
    updates: int
    wanted: int
    elsewhere: int
    save: int
    saved: int
    def __init__(self, verdict: _Optional[_Union[Verdict, str]] = ..., version: _Optional[int] = ..., steps: _Optional[int] = ..., updates: _Optional[int] = ..., wanted: _Optional[int] = ..., elsewhere: _Optional[int] = ..., save: _Optional[int] = ..., saved: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("newer_than",)
    NEWER_THAN_FIELD_NUMBER: _ClassVar[int]
    newer_than: int
    def __init__(self, newer_than: _Optional[int] = ...) -> None: ...

class FetchReply(_message.Message):
    __slots__ = ("version", "weights")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    version: int
    weights: bytes
    def __init__(self, version: _Optional[int] = ..., weights: _Optional[bytes] = ...) -> None: ...

class PulseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PulseReply(_message.Message):
    __slots__ = ("steps", "updates", "version", "phase", "idle_s", "members", "epoch")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    steps: int
    updates: int
    version: int
    phase: str
    idle_s: float
    members: _containers.RepeatedCompositeFieldContainer[Member]
    epoch: str
    def __init__(self, steps: _Optional[int] = ..., updates: _Optional[int] = ..., version: _Optional[int] = ..., phase: _Optional[str] = ..., idle_s: _Optional[float] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., epoch: _Optional[str] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("name", "role", "host", "pid", "index", "incarnation", "silent_s", "steps", "version", "restarts")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    host: str
    pid: int
    index: int
    incarnation: int
    silent_s: float
    steps: int
    version: int
    restarts: int
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., index: _Optional[int] = ..., incarnation: _Optional[int] = ..., silent_s: _Optional[float] = ..., steps: _Optional[int] = ..., version: _Optional[int] = ..., restarts: _Optional[int] = ...) -> None: ...
