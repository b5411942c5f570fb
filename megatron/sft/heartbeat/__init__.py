"""Heartbeats between the ranks of a run: which of them live, which have come to where all wait, and
the one cause for which all of them end.

    member.py      Heartbeat: a rank's connection, its waits, and its end
    hub.py         Hub: the thread of rank 0 that hears all ranks and decides
    cause.py       Cause, its words, and the clock that measures silence
    connection.py  messages over TCP, and how ranks find rank 0

    >>> heartbeat = Heartbeat(rank, world_size, 600.0, store, report, leave)   # doctest: +SKIP
    >>> heartbeat.wait_for_all()        # as a barrier, as long as all answer
    >>> heartbeat.check_all_answer()    # ends all ranks if one is silent
    >>> heartbeat.end(Cause("no room", 1, rank))
"""
