"""Identity of a site: keys, certificate, invite and renewal.

Modules:

    keys           signing key, TLS key and certificate of a site
    invite         the join line that introduces a site to the others
    renewal        a new TLS key and certificate, activated in one step
    private_files  files that only their owner may read or replace
"""
