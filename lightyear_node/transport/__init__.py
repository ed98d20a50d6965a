"""The network: the only importers of gRPC and protobuf.

Nothing of either leaves this package: callers see records, digests and the errors of `errors.py`.
Must not know rounds or tensors.
"""

from __future__ import annotations

import os

# Before gRPC is first imported: it writes a line to stderr for every handshake that a stranger
# fails, past all logging.  What matters of it is raised or counted; who debugs sets it to "debug".
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
