"""Experiments: whole federations on one machine, real or simulated.  The product never imports it.

Modules:

    tasks/             built-in tasks
    prepare/           makes their data sets from the public sources
    federation         a federation of real nodes: folders, start, stop
    federation_view    its live view in the terminal
    demo               the demonstration, from keys to report
    demo_results       its results as records
    demo_report        its report: page, figure, numbers
    demo_plot          its figure
    demo_page          one web page for all its sites
    simulate           a federation in one process, without a network
    simulation_process  simulations in a child process
    simulation_records  the federation to simulate and its results, as records
    simulate_command   `lightyear-node simulate`: run and table
    malfunctions       names and settings of the malfunctions that are injected
    malfunction_plugins  attacks, known or the user's own: what they see and how they are loaded
    attacks/           known attacks
    corrupted_updates  computes the updates of malfunctioning sites
    training_key       what determines a site's training of one round, as a digest
    training_cache     results of training on disk, by that digest
    cached_site        a site that takes the result of its training from there
    faulty_site        a site that sends corrupted updates
    faulty_worker      its worker process
    faulty_node        a node with that worker process
    partition          divides labelled samples among sites; `partition` of the public API
    repartition        gives the sites' tasks such a partition
    acceptance         which corrupted messages would be accepted
    suite              suite files: tasks × rules × malfunctions × counts × seeds
    jobs               the jobs of a suite and the result line of each
    experiment         runs a suite, several jobs at a time
    process_pool       jobs in child processes
    process_pool_main  the process that has loaded torch and forks for each job
    live_view          the live view of an experiment
    progress_bar       progress, rate and remaining time
    result_folder      the folder of a running experiment: lock and results
    run_manifest       what was run, with which versions and data
    results_reader     reads results: finished and failed jobs, verdicts
    summary            means, deviations, paired differences, counts
    tables             the paper's tables from our results
    acceptance_table   shares of accepted messages by kind and task
    table_formats      Markdown, LaTeX, CSV and HTML
    terminal_summary   a short summary for the terminal
    paper_numbers      the paper's numbers, for comparison
    paper_order        the order of the rules, ours and the paper's
    figures            which figures the results allow
    figures_scores     figures of final scores
    figures_judging    figures of verdicts
    figures_shadow     the figure of federated and served models against training alone
    figures_cost       figures of traffic
    plot_style         colours and axes of all figures
    html               building blocks of the HTML reports
    experiment_report  tables, figures and the HTML page of an experiment
    results_api        `read_results` of the public API
    simulate_api       `simulate` of the public API
"""
