"""Verifies, exports, compares and explains journals.

`verify` checks hashes and signatures up to the first invalid record; `export` writes a copy that
can be verified on its own; `compare` compares two sites' journals of the same rounds; `rounds` and
`reasons` explain what happened; `self_check` is for the running node.  Everything is read-only and
works while the node runs; nothing here knows the network.
"""
