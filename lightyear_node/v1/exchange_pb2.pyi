from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Greeting(_message.Message):
    __slots__ = ("version_min", "version_max", "federation", "agreement", "schema", "initial_model", "round", "boot_id", "wall_time_ns", "lamport", "yours", "probe", "clauses", "your_head")
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
    YOURS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    CLAUSES_FIELD_NUMBER: _ClassVar[int]
    YOUR_HEAD_FIELD_NUMBER: _ClassVar[int]
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
    yours: SignedManifest
    probe: bool
    clauses: _containers.RepeatedCompositeFieldContainer[Clause]
    your_head: SignedHead
    def __init__(self, version_min: _Optional[int] = ..., version_max: _Optional[int] = ..., federation: _Optional[str] = ..., agreement: _Optional[bytes] = ..., schema: _Optional[bytes] = ..., initial_model: _Optional[bytes] = ..., round: _Optional[int] = ..., boot_id: _Optional[str] = ..., wall_time_ns: _Optional[int] = ..., lamport: _Optional[int] = ..., yours: _Optional[_Union[SignedManifest, _Mapping]] = ..., probe: bool = ..., clauses: _Optional[_Iterable[_Union[Clause, _Mapping]]] = ..., your_head: _Optional[_Union[SignedHead, _Mapping]] = ...) -> None: ...

class Clause(_message.Message):
    __slots__ = ("key", "digest")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    key: str
    digest: bytes
    def __init__(self, key: _Optional[str] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Announcement(_message.Message):
    __slots__ = ("lamport", "round", "phase", "latest", "seen", "evidence", "head", "progress", "opinion", "boot_id")
    LAMPORT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    OPINION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    lamport: int
    round: int
    phase: str
    latest: SignedManifest
    seen: _containers.RepeatedCompositeFieldContainer[SignedManifest]
    evidence: _containers.RepeatedCompositeFieldContainer[Evidence]
    head: SignedHead
    progress: int
    opinion: Opinion
    boot_id: str
    def __init__(self, lamport: _Optional[int] = ..., round: _Optional[int] = ..., phase: _Optional[str] = ..., latest: _Optional[_Union[SignedManifest, _Mapping]] = ..., seen: _Optional[_Iterable[_Union[SignedManifest, _Mapping]]] = ..., evidence: _Optional[_Iterable[_Union[Evidence, _Mapping]]] = ..., head: _Optional[_Union[SignedHead, _Mapping]] = ..., progress: _Optional[int] = ..., opinion: _Optional[_Union[Opinion, _Mapping]] = ..., boot_id: _Optional[str] = ...) -> None: ...

class Evidence(_message.Message):
    __slots__ = ("first", "second")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SECOND_FIELD_NUMBER: _ClassVar[int]
    first: SignedManifest
    second: SignedManifest
    def __init__(self, first: _Optional[_Union[SignedManifest, _Mapping]] = ..., second: _Optional[_Union[SignedManifest, _Mapping]] = ...) -> None: ...

class SignedHead(_message.Message):
    __slots__ = ("seq", "hash", "signature")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    seq: int
    hash: bytes
    signature: bytes
    def __init__(self, seq: _Optional[int] = ..., hash: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Opinion(_message.Message):
    __slots__ = ("round", "digest", "accepted", "reason")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    round: int
    digest: bytes
    accepted: bool
    reason: str
    def __init__(self, round: _Optional[int] = ..., digest: _Optional[bytes] = ..., accepted: bool = ..., reason: _Optional[str] = ...) -> None: ...

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
