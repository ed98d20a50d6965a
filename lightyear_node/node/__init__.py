"""The daemon of one site.

Modules:

    daemon             starts the parts in order, runs the rounds, closes everything
    construction       construction in typed phases
    home               the node's folder: configuration, keys, state, and checks before a start
    event_loop         feeds the protocol and executes its commands; contains no policy
    inbox              queue of events for the event loop
    recorder           records decisions: in the journal, then in log, metrics and status
    round_jobs         long jobs of a round: training, judging, merging, fetching
    downloads          fetches peers' updates and verifies stored ones
    retention          which weights files are offered, needed, or may be deleted
    run                runs the daemon in this process: signals, state directory
    worker_process     starts the worker process, sends jobs, detects its end
    worker_jobs        worker jobs as typed functions: request, result files, retry
    worker_activity    progress and task output that the worker reports
    worker_output      output of the user's code as limited log lines
    gossip             greetings, announcements and reports of peers
    heartbeat          what this site reports about itself, and when
    peer_connections   channels to all peers and the node's own port
    peer_memory        per peer: journal heads and shared verdicts
    journal_witness    signed heads of each other's journals
    active_config      the configuration in force
    config_changes     which settings an operator has changed
    config_reload      reloads changed files and informs every part
    operator_commands  pause, resume, stop, block, unblock, unquarantine
    stop_request       when the node ends
    local_api          HTTP and the admin socket for this machine
    tracking           starts the configured tracking of completed rounds
"""
