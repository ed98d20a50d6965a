"""The worker: the child process that holds the site's model and data.

The daemon (`node.worker_process`) starts it and sends it jobs over a pipe.  Of this package the
daemon imports only `job_types`, `bad_file_search` and `memory_limit`, which import no torch.  The
worker imports nothing of the network.

Modules:

    __main__           entry point of the process
    pipe               one line per job from the daemon, one line per answer to it
    jobs               the job loop: runs each job on the site
    job_types          results and failures of jobs, shared with the daemon
    task               `Task`: the user's model, data and training
    script             runs a training script; the verbs under a node
    script_state       the objects that a script keeps between rounds
    script_values      checks of the models, metrics and counts that a script hands over
    verb_order         the order of a script's calls, with a sentence for each mistake
    stop_signal        SIGTERM while a script waits for a round
    step_counter       progress of a script, by its optimizer steps
    site               one site's model and data: trains, judges, merges
    shadow             a second model that never merges, and its comparison with the federated one
    training           one round of local training, and its evaluation
    metrics            torchmetrics, MONAI metrics and functions, measured alike
    training_state     optimizer state and tensors that are not exchanged
    rehearsal          one step, one batch and every metric, tried before a node starts
    update_files       exchanged tensors to and from files, rounded to the wire type
    merging            merge with a limit on the loss
    isolated_judging   judges peers so that a bad file affects only its own peer
    bad_file_search    finds the peers whose files make a job fail
    import_checkpoint  any checkpoint as a file that can be judged
    error_redaction    error texts without the user's data
    memory_limit       `RLIMIT_DATA` for the worker
"""
