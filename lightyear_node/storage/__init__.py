"""Everything on disk.

Modules:

    state_directory   lock, journal and weights files of a running node
    blobs             weights files named by the digest of their content
    journal           the node's records in one SQLite file that survives any crash
    journal_reader    reads and verifies a journal without changing it
    journal_segments  closed segments of old records
    hash_chain        what the hash of each record covers
    high_water_mark   the newest committed record, stored outside the database
    round_journal     meaning of the records: durable state and steps of a round
    journal_memory    what a restart reads from the journal
    history           completed rounds in memory, for views and tracking
    disk_space        free space, what may be deleted, and waiting for space
    file_descriptors  limits of descriptors, and waiting for one
    atomic_files      files that are replaced as a whole
    safetensors_header  headers of weights files
"""
