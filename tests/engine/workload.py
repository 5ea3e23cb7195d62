"""Requests that join an engine, and leave it, at given steps."""

from __future__ import annotations


def drive(engine, asked, joins, aborts, *, most_steps):
    """Add the requests ``asked``, (tokens, params, keywords), and step until all have ended.

    Request i joins at step ``joins[i]`` and is aborted ``aborts[i]`` steps later, if not None.
    Checks the cache after each step. Returns two dicts by request id: (request, tokens, params,
    step of its abort), and its deltas.
    """
    cache, most = engine.cache, engine.limits.max_running
    running, deltas, step = {}, {}, 0
    todo = sorted(
        zip(joins, range(len(asked)), asked, aborts, strict=False), key=lambda one: one[:2]
    )
    while todo or engine.has_work:
        while todo and todo[0][0] <= step:
            _, _, (tokens, params, how), abort = todo.pop(0)
            request = engine.add(tokens, params, **how)
            running[request.id] = (request, tokens, params, None if abort is None else step + abort)
        for request, _, _, abort in running.values():
            if abort == step:
                engine.abort(request)
        for delta in engine.step():
            assert delta.error is None, delta.error
            deltas.setdefault(delta.request.id, []).append(delta)
        cache.check()
        assert engine.num_running <= most
        step += 1
        assert step < most_steps, "no progress"
    return running, deltas
