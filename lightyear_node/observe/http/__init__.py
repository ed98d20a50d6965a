"""The node's HTTP server: metrics, health, the JSON API and the dashboard.

Modules:

    server        routes and answers; loopback only unless TLS or a token is configured
    connections   limits on connections, per address and in total, and on their duration
    auth          TLS, token and host checks
    api           the read-only JSON API
    views         status and rounds as shown by API and page
    static_files  files of the page, from this package only
"""
