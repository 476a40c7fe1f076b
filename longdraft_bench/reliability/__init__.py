"""Kills, damaged inputs, long texts, and a server under load and attack: `longdraft bench soak` and `bench server`.

    kills                   kill -9 at random moments of generations and resumes
    fuzzing                 damaged and hostile inputs, made by fuzzing_inputs
    long_text               memory and time for each step of one text
    serving                 a server under load and with faulty clients
    attacks                 attacks, and what is left for other clients
    soak_server             honest and hostile clients of one server for an hour
    server_process          the server in a process of its own, and what its clients share
"""
