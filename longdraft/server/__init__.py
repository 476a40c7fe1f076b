"""`longdraft serve`: OpenAI's API, and what long texts need beside it: progress, resume, a look inside the drafting.

    app         routes together            scheduler   who runs, in the one engine thread
    schemas     what a request may say     jobs        one text on its way, and how it reaches its reader
    prepare     request -> jobs            replies     jobs -> what a client reads
    guard       keys, hosts, body limits   sse         streams
    generations journals over HTTP         metrics     Prometheus
    run         sockets and signals        page/       the page at /
"""
