"""The network: the only package that imports gRPC and protobuf.

Callers see records, digests and the errors of `errors.py`, never a type of gRPC or protobuf.
Must not know rounds or tensors.

    server         our port: TLS, authentication, one handler for each RPC
    handlers       answers a peer's request, whichever way it arrived
    client         calls one peer
    channel        the connection of a client: opened by us
    reverse_calls  calls in the other direction, for sites without a port
    messages       protobuf messages to records and back, with every field checked
    codec          one chunk of weights in its wire format
    download       decodes, checks and stores the chunks of one fetch
    upload_cache   encoded copies of our updates
    limits         sizes, durations and counts
    rate_limits    calls of one peer: how many at once, how often
    stranger_limits    limits connections that have not authenticated
    handshake_counter  counts connections that never authenticate
    sockets            lists and closes single connections
    grpc_errors    gRPC's status codes as `PeerError`
"""

from __future__ import annotations

import os

# Before gRPC is first imported: it logs every failed handshake to stderr, which would let any
# client fill the log.  Relevant failures are raised or counted; for debugging, set it to "debug".
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
