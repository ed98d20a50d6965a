"""Every limit of the network in one place, each with its reason.

Owns numbers and the token bucket; must not know who uses them.  gRPC's own defaults are wide open
(any number of streams, two minutes for a handshake), so that each is set here.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightyear_node.records import CHUNK_BYTES

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# -- what a message may weigh ---------------------------------------------------------------------
SMALL_MESSAGE_BYTES_MAX = 64 * KIB
"""All that a server ever receives: greetings, announcements, requests."""
PIECE_BYTES_MAX = 2 * MIB
"""One chunk that does not compress, or the chunk list of the largest model, with room to spare."""
LOOKAHEAD_BYTES = MIB
"""One chunk on its way while one is being read: 80 Mbit/s where an answer takes 100 ms."""
RAW_BYTES_MAX = 8 * GIB
"""No model is larger; its chunk list has 256 KiB."""
CHUNKS_MAX = RAW_BYTES_MAX // CHUNK_BYTES
FEDERATION_CHARS_MAX = 128
"""Names that people write; long enough for them, short enough for a log line."""
BOOT_ID_CHARS_MAX = 64
"""A UUID, in whichever spelling."""
PHASE_CHARS_MAX = 32
DTYPE_CHARS_MAX = 16
REASON_CHARS_MAX = 32
SEEN_MAX = 128
"""Updates of others in one announcement: two of each of 64 sites, at some 430 bytes."""
EVIDENCE_MAX = 4
"""Proofs in one announcement; with those updates it still is a small message."""
CLAUSES_MAX = 256
"""Keys of one agreement: its settings, and one for each of 64 sites."""
CLAUSE_CHARS_MAX = 128
DETAIL_CHARS_MAX = 300
"""What is quoted of a peer's explanation: one line."""

# -- how long -------------------------------------------------------------------------------------
CALL_S = 5.0
"""Greeting and announcement: a heartbeat is lost rather than late."""
HANDSHAKE_S = 10.0
"""From the first byte of a connection to the first call of a known peer."""
CHUNK_READ_S = 30.0
"""A fetch ends when no chunk has come for so long; never by its total duration, which is the
model's size over the link's speed and nobody's fault."""
CHUNK_WRITE_S = 30.0
"""A reader that takes longer for 1 MiB (35 kB/s) is slower than any link worth serving."""
ASK_S = 5.0
"""From the opening of a call to the end of its request, which is 64 KiB at most."""
GIVE_UP_S = 1.0
"""For the reader of a stalled stream to learn why it ends; then its connection is cut."""
STOP_S = 2.0
"""Calls still running when the node stops get so long; a fetch that is cut resumes elsewhere."""
RETIRE_S = 600.0
"""A fetch that runs while our certificate or the peer's address changes may end on the old line."""

# -- how many -------------------------------------------------------------------------------------
FETCHES_PER_PEER_MAX = 2
"""One, and one more while the server has not yet noticed that the first was cut."""
FETCHES_MAX = 8
"""Together they hold at most 8 x 4 chunks in memory.  There is room beyond it for as many peers as
may be faulty, so that these cannot keep the others out by reading slowly."""
CHUNKS_AHEAD = 2
"""Encoded while one is being written: enough to keep the line busy."""
FETCHES_ISSUED_MAX = 4
"""Updates pulled at the same time: enough to fill a link, few enough to keep memory flat.  Again
with room beyond it for the faulty."""
FETCH_TRIES = 3
"""Broken lines in a row, without a chunk in between, before a fetch is given up until the next
heartbeat.  A line that breaks after every chunk still brings the update."""
FETCH_PAUSE_S, FETCH_PAUSE_S_MAX = 1.0, 30.0
"""Before the second try, doubled for each further one; the pause is anything between nothing and
that, so that peers cut off by the same failure do not come back at the same moment."""
CALLS_PER_PEER_MAX = 4
"""Of one kind at the same time: one, and some that the other side has given up already."""
LENT_IDLE = 2
"""Lines that a site without a port keeps open to every other: one for a fetch, one for the rest."""
LENT_PER_PEER_MAX = 6
"""Idle and used ones of a peer at the same time."""
LENT_WAIT_S = 5.0
"""For a line to a site without a port: it opens the next one as soon as one is used."""
LENT_PAUSE_S_MAX = 5.0
"""Before a line is opened again to a site that does not answer: about a heartbeat."""
CONNECTIONS_PER_PEER_MAX = 4
"""One, one by an operator's command, and those that broke unnoticed; of more the idlest are ended.
What a reader leaves unread of an answer stays with its connection, after the call has ended."""
CALLS_MAX = 64 * 16
"""For the whole server, as a last resort: what one peer may have open is limited before."""
CALLS_PER_S, CALLS_BURST = 10.0, 40
"""Of one kind and peer.  In a hospital a heartbeat takes 5 s and a round minutes, but where sites
try things out on one machine both take half a second; a call costs a millisecond, a flood 1 %."""
STRIKES_MAX, STRIKES_S, COOL_DOWN_S = 10, 60.0, 300.0
"""Ten messages within a minute that no honest site sends: nothing of that peer is even parsed for
five minutes."""

Options = tuple[tuple[str, int | str], ...]

_BOTH: Options = (
    # A partner that vanished without a word is noticed within 28 s, and so within 30.
    # `keepalive_timeout_ms` alone does nothing in this gRPC; `ping_timeout_ms` does.
    ("grpc.keepalive_time_ms", 18_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Metadata is not used at all; the defaults are 8 and 16 KiB.
    ("grpc.max_metadata_size", 4 * KIB),
    ("grpc.absolute_max_metadata_size", 8 * KIB),
    # Retrying is our own decision, and bounded.
    ("grpc.enable_retries", 0),
    # How far a sender may run ahead of us: what is on its way when a line breaks is sent again, and
    # what waits here takes memory.  Left alone, gRPC lets it grow to many megabytes.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
)

SERVER_OPTIONS: Options = (
    *_BOTH,
    # Chunks also come in, on the lines of a site without a port; requests are measured when read.
    ("grpc.max_receive_message_length", PIECE_BYTES_MAX),
    ("grpc.max_send_message_length", PIECE_BYTES_MAX),
    # With port sharing on, a second daemon would silently take half of the calls.
    ("grpc.so_reuseport", 0),
    # Per connection: two fetches, an announcement, a greeting and six lent lines are ten.
    ("grpc.max_concurrent_streams", 16),
    # Sockets that connect and say nothing; the default is two minutes.
    ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_S)),
    # Peers ping every 20 s; twice that often is still tolerated, faster is a flood.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 3),
    # A new handshake every hour meets renewed certificates and withdrawn pins.
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.max_connection_age_ms", 3_600_000),
    ("grpc.max_connection_age_grace_ms", 600_000),
)

CHANNEL_OPTIONS: Options = (
    *_BOTH,
    ("grpc.max_receive_message_length", PIECE_BYTES_MAX),
    ("grpc.max_send_message_length", PIECE_BYTES_MAX),
    # Peers are reached directly or not at all; through a proxy even loopback would fail.
    ("grpc.enable_http_proxy", 0),
    # A peer that comes back is found at the next heartbeat; the default waits up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # Closing a channel closes its connection, also when another channel has the same address.
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(slots=True)
class TokenBucket:
    """Lets `burst` through at once and `per_s` in the long run; the caller brings the time."""

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
