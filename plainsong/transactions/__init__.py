"""Transactions of the client: who takes part, in which order it goes, and what is done when something fails.

    participants   what takes part implements: TransactionAware, AsyncTransactionAware
    values         Transaction, and what the service tells about one
    course         start, finish, abort, checkpoint: every step and every failure, for both flavours
    messages       the participant that publishes: buffers, spills, publishes last, rolls back
    calls          the requests of the transaction service, and of messages under a pointer
    current        the transaction that a block of code is in
    retries        a function run in a transaction, again after a conflict

``plainsong.sync.transaction`` and ``plainsong.aio.transaction`` put them into the hands of threads and of tasks:

    with client.transaction(participants=[rows]) as tx:      TransactionContext, or AsyncTransactionContext
        tx.publish("orders", b"paid")
    context.add(participant)      remove(participant)      start()      finish()      abort()      checkpoint()
"""
