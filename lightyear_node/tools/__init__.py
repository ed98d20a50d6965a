"""Operator tools beside the daemon: preflight, diagnosis, model export, peers file, scoring.

Modules:

    preflight           checks before a start: is this site ready, are the others?
    diagnosis           every step of the connection to a peer, up to the first that fails
    connectivity_probe  DNS, TCP, TLS and certificate at a peer's address
    peers_file          writes `peers.yaml`
    score_checkpoint    judges a checkpoint as the node would
    model_export/       a model and its card as files
"""
