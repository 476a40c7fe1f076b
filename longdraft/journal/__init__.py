"""The journal of a text: what it depends on, and every new token before it is shown. A journal can be resumed.

    with Journal.create(folder, header, run) as journal:    # one process writes at a time
        journal.append(tokens, drafted, seconds)

    content = read_journal(folder)                          # the valid part, however the file was interrupted

    format.py      the records of the file, and reading them
    writer.py      appending records
    config_hash.py the hash by which a journal recognises the model's configuration
    snapshot.py    keys and values of the text beside the journal, so that it is not read again
"""
