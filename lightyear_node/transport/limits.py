"""Limits of the network: sizes, durations and counts, each with its reason.

Owns the numbers, gRPC's options and the token bucket; must not know their users.  gRPC's own
defaults are too generous (unlimited streams, two minutes for a handshake), so each is set here.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightyear_node.storage.file_descriptors import PER_PEER_CONNECTIONS
from lightyear_node.types import CHUNK_BYTES

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# -- Sizes ----------------------------------------------------------------------------------------
SMALL_MESSAGE_BYTES_MAX = 64 * KIB
"""Any request: a greeting, an announcement or a fetch request."""
PIECE_BYTES_MAX = 2 * MIB
"""One incompressible chunk, or the chunk list of the largest model, with a margin."""
LOOKAHEAD_BYTES = MIB
"""One chunk in flight while another is processed: 80 Mbit/s at a round-trip time of 100 ms."""
RAW_BYTES_MAX = 8 * GIB
"""Largest model; its chunk list takes 256 KiB."""
CHUNKS_MAX = RAW_BYTES_MAX // CHUNK_BYTES
FRAME_BYTES_MAX = CHUNK_BYTES + 4096
"""An encoded chunk: every plane stored uncompressed, plus the planes' headers."""
FEDERATION_CHARS_MAX = 128
"""A name that people choose; short enough for a log line."""
BOOT_ID_CHARS_MAX = 64
"""A UUID in any notation."""
PHASE_CHARS_MAX = 32
DTYPE_CHARS_MAX = 16
REASON_CHARS_MAX = 32
SEEN_MAX = 128
"""Updates of other sites in one announcement: two from each of 64 sites, about 430 bytes each."""
EVIDENCE_MAX = 4
"""Proofs in one announcement; together with SEEN_MAX updates it is still a small message."""
CLAUSES_MAX = 256
"""Keys of one federation config: its settings, and one for each of 64 sites."""
CLAUSE_CHARS_MAX = 128
DETAIL_CHARS_MAX = 300
"""What is quoted of a peer's error text: one line."""

# -- Durations ------------------------------------------------------------------------------------
CALL_S = 5.0
"""Deadline of a greeting or an announcement; a late heartbeat is worth no more than a lost one."""
HANDSHAKE_S = 10.0
"""From the first byte of a connection to the first call of a known peer."""
CHUNK_READ_S = 60.0
"""Timeout for the next chunk of a fetch: 1 MiB to each of seven peers over one line of 1 Mbit/s.
The total duration has no limit: it depends only on the model's size and the link's speed."""
CHUNK_WRITE_S = 60.0
"""Timeout for a peer to read 1 MiB; the line is shared with other peers, and not always evenly."""
REQUEST_READ_S = 5.0
"""From the opening of a call to the end of its request, which is 64 KiB at most."""
REFUSAL_WRITE_S = 1.0
"""For a stalled reader to receive the status of its call; then its connection is closed."""
STOP_S = 2.0
"""For running calls when the node stops; an interrupted fetch resumes later."""
RETIRE_S = 600.0
"""For running fetches after our certificate or the peer's address has changed: they may finish on
the old connection."""

# -- Fetches --------------------------------------------------------------------------------------
FETCHES_PER_PEER_MAX = 2
"""One, and one more while the server has not yet noticed that the first was interrupted."""
FETCHES_MAX = 8
"""Fetches served at once; they hold at most 8 x 4 chunks in memory.  Slots for as many peers as may
be faulty are added, so that slow readers among those cannot keep the others out."""
CHUNKS_AHEAD = 2
"""Chunks encoded while one is being written: enough to keep the connection busy."""
FETCHES_ISSUED_MAX = 4
"""Updates downloaded at once: enough to fill a link, few enough to bound memory.  Slots for the
faulty peers are added here, too."""
FETCH_RETRIES_MAX = 3
"""Retries in a row, without a chunk in between, before a fetch is given up until the next
heartbeat.  A connection that breaks after every chunk still completes the update."""
FETCH_BACKOFF_S, FETCH_BACKOFF_S_MAX = 1.0, 30.0
"""Before the first retry, doubled for each further one.  Full jitter (uniform from 0), so that
peers interrupted by the same failure do not return at the same moment."""
ENCODED_UPLOADS_KEPT = 3
"""The newest update in both forms (full and delta), and one that a slow peer is still fetching."""

# -- Reverse calls --------------------------------------------------------------------------------
REVERSE_STREAMS_IDLE = 2
"""Streams that a site without a port keeps open to each peer: one for a fetch, one for the rest."""
REVERSE_STREAMS_PER_PEER_MAX = 6
"""Idle and busy streams of one peer."""
REVERSE_STREAM_WAIT_S = 5.0
"""For an idle stream of a site without a port, which opens the next one when one is used."""
REVERSE_BACKOFF_S_MAX = 5.0
"""Before another stream to a peer that does not answer: about one heartbeat."""
REVERSE_ANSWERS_AHEAD = 2
"""Answers read from a stream and not yet consumed."""

# -- Calls and connections ------------------------------------------------------------------------
CALLS_PER_PEER_MAX = 4
"""Of one kind at once: one, and some that the peer has already given up."""
CALLS_MAX = 64 * 16
"""For the whole server, as a last resort; the limits per peer take effect first."""
CALLS_PER_S, CALLS_BURST = 10.0, 40
"""Of one kind and peer.  Heartbeats take 5 s in production and 0.5 s in tests on one machine; a
call takes 1 ms of CPU, so a flood at this rate costs 1 %."""
STRIKES_MAX, STRIKES_S, COOL_DOWN_S = 10, 60.0, 300.0
"""After ten malformed messages within a minute, a peer's calls are refused unread for five
minutes."""
CONNECTIONS_PER_PEER_MAX = PER_PEER_CONNECTIONS
"""One, one by an operator's command, and broken ones that were not noticed yet; beyond it the
longest idle are closed.  Unread data stays with its connection even after the call has ended."""
CONNECTIONS_KEPT = 1024
"""Remote addresses of authenticated connections that are remembered: a few per peer are in use."""
HANDSHAKES_KEPT = 4096
"""Handshakes in progress; beyond it the oldest count as failed."""
STRANGERS_BURST, STRANGERS_BURST_S = 16, 0.05
"""After so many new connections their number is checked at once instead of a few times per second;
but never more often than this, since a check takes 1 to 2 ms."""

Options = tuple[tuple[str, int | str], ...]

_BOTH: Options = (
    # Detects a peer that has disappeared within 28 s.
    # `keepalive_timeout_ms` alone has no effect in this gRPC; `ping_timeout_ms` has.
    ("grpc.keepalive_time_ms", 18_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Metadata is not used; the defaults are 8 and 16 KiB.
    ("grpc.max_metadata_size", 4 * KIB),
    ("grpc.absolute_max_metadata_size", 8 * KIB),
    # The client retries by itself, a limited number of times.
    ("grpc.enable_retries", 0),
    # Data in flight is sent again after a disconnect, and unread data takes memory.  By default,
    # gRPC lets the window grow to many megabytes.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
)

SERVER_OPTIONS: Options = (
    *_BOTH,
    # Chunks arrive, too, on reverse streams; the size of requests is checked when they are parsed.
    ("grpc.max_receive_message_length", PIECE_BYTES_MAX),
    ("grpc.max_send_message_length", PIECE_BYTES_MAX),
    # With port sharing, a second daemon would silently receive half of the calls.
    ("grpc.so_reuseport", 0),
    # Per connection: two fetches, an announcement, a greeting and six reverse streams are ten.
    ("grpc.max_concurrent_streams", 16),
    # For clients that connect and send nothing; the default is two minutes.
    ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_S)),
    # Peers ping every 18 s; more often than every 10 s is a flood.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 3),
    # A new handshake every hour applies renewed certificates and withdrawn pins.
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.max_connection_age_ms", 3_600_000),
    ("grpc.max_connection_age_grace_ms", 600_000),
)

CHANNEL_OPTIONS: Options = (
    *_BOTH,
    ("grpc.max_receive_message_length", PIECE_BYTES_MAX),
    ("grpc.max_send_message_length", PIECE_BYTES_MAX),
    # Peers are reached directly; through a proxy even loopback would fail.
    ("grpc.enable_http_proxy", 0),
    # Reconnects at the next heartbeat; the default waits up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # Closing a channel closes its connection, even if another channel has the same address.
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(slots=True)
class TokenBucket:
    """Allows `burst` events at once and `per_s` per second on average; callers pass the time."""

    per_s: float
    burst: float
    _tokens: float = 0.0
    _filled_at: float = float("-inf")

    def take(self, now: float) -> bool:
        self._tokens = min(self.burst, self._tokens + self.per_s * (now - self._filled_at))
        self._filled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
