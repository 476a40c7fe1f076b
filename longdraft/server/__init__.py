"""`longdraft serve`: OpenAI's API, with progress, resume and drafting details for long texts, and a page at /.

A request passes these modules, in this order:

    run             sockets, signals, slow connections
    middleware      API keys, hosts, limits for bodies, log line
    routes          the URLs; `app` mounts them, with error handlers and the page
    schemas         the request's parameters
    service         the path of a request: prepare, schedule, answer
    prepare         request -> jobs, outside the event loop
    scheduler       admission, and the engine thread that runs the jobs (jobs, job_statistics)
    replies         events -> replies, whole or as a stream

Beside them: settings, errors, logs, metrics, and journals (the folder of journals).
"""
