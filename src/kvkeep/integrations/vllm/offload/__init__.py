"""kvkeep below vLLM's own offloading: a secondary tier, and a spec that works without a GPU.

    ../tier.py     KVKeepTier: vLLM's interface of a secondary tier; the names that users give
    engine.py      vLLM's connector of offloading, which tells tiers of their engine; its manager
    notes.py       what workers tell the tier of their pages, and which bytes of a row are a chunk
    requests.py    what is known of a request
    lookups.py     which chunks of a request are stored, and loaded
    jobs.py        copies between vLLM's memory and the store, in threads
    spec.py        KVKeepSpec: vLLM's spec, one layout of rows for all numbers of ranks where vLLM
                   proves it, and a mover where there is no GPU

vLLM keeps KV in its primary tier, which is rows of host memory, one for each *chunk*: some blocks
of one group of layers, of all ranks. A secondary tier gets copies of the rows, and fills rows again
before vLLM copies them into pages.
"""
