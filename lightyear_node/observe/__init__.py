"""Makes a running node visible: log, metrics, status, HTTP server, admin socket, systemd.

Modules:

    observer      receives every event; feeds log, metrics and status
    peer_status   what is known of each peer
    log           one event per line, text or JSON
    log_limits    limits log lines that peers and strangers can cause
    metrics       Prometheus metrics: names, labels, meaning
    progress      progress, rate and remaining time of the current work
    short_names   shortened site names that stay distinct
    admin_socket  the local socket that `lightyear-node status` uses
    systemd       readiness, watchdog and status for systemd
    http/         monitoring, JSON API and web page
    page/         static files of the web page
    event_log     events as log lines
"""
