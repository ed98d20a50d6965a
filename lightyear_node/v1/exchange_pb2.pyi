from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Greeting(_message.Message):
    __slots__ = ("version_min", "version_max", "federation", "agreement", "schema", "initial_model", "round", "boot_id", "wall_time_ns", "lamport", "probe")
    VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    FEDERATION_FIELD_NUMBER: _ClassVar[int]
    AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    INITIAL_MODEL_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    WALL_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    LAMPORT_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    version_min: int
    version_max: int
    federation: str
    agreement: bytes
    schema: bytes
    initial_model: bytes
    round: int
    boot_id: str
    wall_time_ns: int
    lamport: int
    probe: bool
    def __init__(self, version_min: _Optional[int] = ..., version_max: _Optional[int] = ..., federation: _Optional[str] = ..., agreement: _Optional[bytes] = ..., schema: _Optional[bytes] = ..., initial_model: _Optional[bytes] = ..., round: _Optional[int] = ..., boot_id: _Optional[str] = ..., wall_time_ns: _Optional[int] = ..., lamport: _Optional[int] = ..., probe: bool = ...) -> None: ...

class Announcement(_message.Message):
    __slots__ = ("lamport", "round", "phase", "latest")
    LAMPORT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    lamport: int
    round: int
    phase: str
    latest: SignedManifest
    def __init__(self, lamport: _Optional[int] = ..., round: _Optional[int] = ..., phase: _Optional[str] = ..., latest: _Optional[_Union[SignedManifest, _Mapping]] = ...) -> None: ...

class SignedManifest(_message.Message):
    __slots__ = ("manifest", "signature")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    signature: bytes
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("federation", "peer", "generation", "round", "lamport", "digest", "schema", "raw_bytes", "samples", "base", "dtype")
    FEDERATION_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LAMPORT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    federation: str
    peer: str
    generation: int
    round: int
    lamport: int
    digest: bytes
    schema: bytes
    raw_bytes: int
    samples: int
    base: bytes
    dtype: str
    def __init__(self, federation: _Optional[str] = ..., peer: _Optional[str] = ..., generation: _Optional[int] = ..., round: _Optional[int] = ..., lamport: _Optional[int] = ..., digest: _Optional[bytes] = ..., schema: _Optional[bytes] = ..., raw_bytes: _Optional[int] = ..., samples: _Optional[int] = ..., base: _Optional[bytes] = ..., dtype: _Optional[str] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("digest", "first_chunk", "delta")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    first_chunk: int
    delta: bool
    def __init__(self, digest: _Optional[bytes] = ..., first_chunk: _Optional[int] = ..., delta: bool = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("list", "chunk")
    LIST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    list: ChunkList
    chunk: Chunk
    def __init__(self, list: _Optional[_Union[ChunkList, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class ChunkList(_message.Message):
    __slots__ = ("raw_bytes", "sha256")
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    raw_bytes: int
    sha256: bytes
    def __init__(self, raw_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("index", "frame")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    index: int
    frame: bytes
    def __init__(self, index: _Optional[int] = ..., frame: _Optional[bytes] = ...) -> None: ...

class Question(_message.Message):
    __slots__ = ("hello", "announce", "fetch")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    hello: Greeting
    announce: Announcement
    fetch: FetchRequest
    def __init__(self, hello: _Optional[_Union[Greeting, _Mapping]] = ..., announce: _Optional[_Union[Announcement, _Mapping]] = ..., fetch: _Optional[_Union[FetchRequest, _Mapping]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("hello", "announce", "piece", "refusal")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    hello: Greeting
    announce: Announcement
    piece: Piece
    refusal: Refusal
    def __init__(self, hello: _Optional[_Union[Greeting, _Mapping]] = ..., announce: _Optional[_Union[Announcement, _Mapping]] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("code", "details")
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    code: int
    details: str
    def __init__(self, code: _Optional[int] = ..., details: _Optional[str] = ...) -> None: ...
