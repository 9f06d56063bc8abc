"""Faults to inject into a cluster under load: each function begins a fault, and returns once the fault is over."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import trio

from tests.cluster.harness import SESSION_TIMEOUT_S, Cluster
from tests.cluster.proxy import WAYS, Storm, Way
from tests.cluster.voices import Doubt, NotSent, Refused, Stage
from tests.freezing import freeze
from tests.hbase_servers import HBaseServers
from tests.patience import PATIENCE_S

HOUR_S = 3_600
#: Acknowledged requests that prove that work continues: more than can have been in flight when the fault began.
WORKED = 40


@dataclass(slots=True)
class Attack:
    """A cluster, its random numbers, and a record of the faults."""

    stage: Stage
    rng: Random
    made: list[str] = field(default_factory=list)

    @property
    def cluster(self) -> Cluster:
        return self.stage.cluster

    def note(self, what: str) -> None:
        """Record a fault, with the number of requests acknowledged by then."""
        self.made.append(f"{self.stage.answers['acknowledged']:6} acknowledged: {what}")
        print(self.made[-1])  # helps when a run does not finish

    async def lasts(self, least_s: float, most_s: float) -> None:
        await trio.sleep(self.rng.uniform(least_s, most_s))

    async def works_on(self) -> None:
        """Wait until requests are acknowledged and transactions committed again after the last fault."""
        await self.stage.more(WORKED, patience_s=self.stage.quiet_s)
        await self.stage.more(1, "committed", patience_s=self.stage.quiet_s)


Fault = Callable[[Attack], Awaitable[None]]


async def kill(attack: Attack) -> None:
    """Kill an instance and start it again."""
    instance = attack.rng.choice(attack.cluster.instances)
    attack.note(f"{instance.name} is killed")
    await instance.kill()
    await attack.lasts(0, SESSION_TIMEOUT_S + 2)
    await instance.start_again()


async def restart(attack: Attack) -> None:
    """Stop an instance as in an upgrade, and start it again."""
    instance = attack.rng.choice(attack.cluster.instances)
    attack.note(f"{instance.name} is stopped")
    await instance.stop()
    await instance.start_again()


async def pause(attack: Attack) -> None:
    """Freeze an instance for less than its session timeout."""
    await _freeze(attack, 0.2, SESSION_TIMEOUT_S - 1)


async def long_pause(attack: Attack) -> None:
    """Freeze an instance until others have taken over, then wake it."""
    await _freeze(attack, SESSION_TIMEOUT_S + 2, SESSION_TIMEOUT_S + 5)


async def _freeze(attack: Attack, least_s: float, most_s: float) -> None:
    instance = attack.rng.choice(attack.cluster.instances)
    attack.note(f"{instance.name} is frozen")
    instance.freeze()
    await attack.lasts(least_s, most_s)
    instance.thaw()


async def front_end_dies(attack: Attack) -> None:
    """Kill one of an instance's front ends; the owner process starts another."""
    instance = attack.rng.choice(attack.cluster.instances)
    attack.note(f"a front end of {instance.name} is killed")
    os.kill(attack.rng.choice(instance.front_ends()), signal.SIGKILL)
    await attack.lasts(0, 1)


async def front_end_freezes(attack: Attack) -> None:
    """Freeze one of an instance's front ends, with all its connections, then wake it."""
    instance = attack.rng.choice(attack.cluster.instances)
    attack.note(f"a front end of {instance.name} is frozen")
    await _stand_still([attack.rng.choice(instance.front_ends())], attack, 1, 6)


async def owner_process_dies(attack: Attack) -> None:
    """Kill the process that owns an instance's front ends, and start the instance again."""
    instance = attack.rng.choice(attack.cluster.instances)
    attack.note(f"the owner process of {instance.name} is killed")
    await instance.kill_owner()
    await instance.start_again()


async def whole_pause(attack: Attack) -> None:
    """Freeze all processes of an instance until others have taken over, then wake them."""
    instance = attack.rng.choice(attack.cluster.instances)
    attack.note(f"{instance.name} is frozen with its front ends")
    instance.state = "frozen"
    pids = [instance.daemon.pid, *instance.front_ends()]
    await _stand_still(pids, attack, SESSION_TIMEOUT_S + 2, SESSION_TIMEOUT_S + 5)
    instance.state = "up"


async def _stand_still(pids: list[int], attack: Attack, least_s: float, most_s: float) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    await attack.lasts(least_s, most_s)
    for pid in pids:
        with suppress(ProcessLookupError):  # replaced because it did not answer
            os.kill(pid, signal.SIGCONT)


async def lossy_gateway(attack: Attack) -> None:
    """Some of an instance's calls to HBase get no response, a late one, or half of one."""
    instance = attack.rng.choice(attack.cluster.instances)
    storm = Storm(attack.rng.randrange(1 << 30), share=0.05, delay_s=4.0)
    attack.note(f"{instance.name} loses answers of HBase")
    instance.thrift.choose = storm
    await attack.lasts(2, 6)
    instance.thrift.heal()


async def no_gateway(attack: Attack) -> None:
    """Cut an instance off from HBase."""
    instance = attack.rng.choice(attack.cluster.instances)
    how = attack.rng.choice((instance.thrift.stall, instance.thrift.refuse))
    attack.note(f"{instance.name} is cut off from HBase: {how.__name__}")
    how()
    await attack.lasts(1, 7)
    instance.thrift.heal()


async def unheard_link(attack: Attack) -> None:
    """Cut the links to an instance in one direction: either requests to it or its responses are lost."""
    instance = attack.rng.choice(attack.cluster.instances)
    way: Way = attack.rng.choice(WAYS)
    attack.note(f"links to {instance.name} are cut in one direction: {way}")
    assert instance.links is not None
    instance.links.stall(way)
    await attack.lasts(1, SESSION_TIMEOUT_S + 3)
    instance.links.heal()


async def no_links(attack: Attack) -> None:
    """Cut all links between instances, in both directions; ZooKeeper and HBase stay reachable."""
    links = [each.links for each in attack.cluster.instances if each.links is not None]
    stalls = attack.rng.random() < 0.5
    attack.note(f"all links are cut: {'stall' if stalls else 'refuse'}")
    for proxy in links:
        (proxy.stall if stalls else proxy.refuse)()
    await attack.lasts(1, SESSION_TIMEOUT_S + 3)
    for proxy in links:
        proxy.heal()


async def no_zookeeper(attack: Attack) -> None:
    """Cut one instance, or all of them, off from ZooKeeper."""
    everybody = attack.cluster.instances
    chosen = everybody if attack.rng.random() < 0.4 else [attack.rng.choice(everybody)]
    proxies = [each.zookeeper for each in chosen if each.zookeeper is not None]
    stalls = attack.rng.random() < 0.5
    names = ", ".join(each.name for each in chosen)
    attack.note(f"{names} cut off from ZooKeeper: {'stall' if stalls else 'refuse'}")
    for proxy in proxies:
        (proxy.stall if stalls else proxy.refuse)()
    await attack.lasts(1, SESSION_TIMEOUT_S + 3)
    for proxy in proxies:
        proxy.heal()


async def gateway_dies(attack: Attack) -> None:
    """Kill the Thrift gateway and start it again."""
    attack.note("the Thrift gateway is killed")
    await attack.cluster.kill_hbase("thrift")
    await attack.lasts(0, 2)
    await attack.cluster.start_hbase("thrift")


async def gateway_dies_twice(attack: Attack) -> None:
    """Kill the Thrift gateway, and again while it starts or soon after."""
    attack.note("the Thrift gateway is killed twice")
    for most_s in (8, 2):
        await attack.cluster.kill_hbase("thrift")
        await attack.cluster.start_hbase("thrift")
        await attack.lasts(0, most_s)


async def hbase_dies(attack: Attack) -> None:
    """Kill master, region server and ZooKeeper, and start them again."""
    attack.note("HBase and ZooKeeper are killed")
    await attack.cluster.kill_hbase("hbase")
    await attack.lasts(0, 2)
    await attack.cluster.start_hbase("hbase")


async def hbase_freezes(attack: Attack) -> None:
    """Freeze the gateway, or HBase with its ZooKeeper, then wake it."""
    name = attack.rng.choice(("thrift", "hbase"))
    attack.note(f"{name} is frozen")
    process = attack.cluster.hbase.processes[name]
    process.send_signal(signal.SIGSTOP)
    await attack.lasts(1, 6)
    process.send_signal(signal.SIGCONT)


# --- HBase with its servers in separate processes ------------------------------------------------


async def region_server_dies(attack: Attack) -> None:
    """Kill the region server of the messages table; work continues on the other before it is started again."""
    hbase, name = await _of_messages(attack)
    attack.note(f"{name}, which has the messages, is killed")
    await attack.cluster.kill_hbase(name)
    await trio.to_thread.run_sync(hbase.expire, name)
    await attack.works_on()
    await _start_again(attack, name)


async def region_server_freezes(attack: Attack) -> None:
    """Freeze the region server of the messages table until the other has its regions, then wake it.

    Only on HDFS, which by then refuses writes to its log.
    """
    hbase, name = await _of_messages(attack)
    attack.note(f"{name}, which has the messages, is frozen")
    process = hbase.processes[name]
    freeze(process.pid)
    await trio.to_thread.run_sync(hbase.expire, name)
    await attack.works_on()
    process.send_signal(signal.SIGCONT)
    # HBase tells the server that it counts as dead, and the server exits.
    await trio.to_thread.run_sync(process.wait, attack.stage.quiet_s)
    await _start_again(attack, name)


async def region_server_and_gateway_die(attack: Attack) -> None:
    """Kill the gateway while the regions of a killed region server are moving to the other."""
    hbase, name = await _of_messages(attack)
    attack.note(f"{name}, which has the messages, is killed, and the Thrift gateway seconds later")
    await attack.cluster.kill_hbase(name)
    await trio.to_thread.run_sync(hbase.expire, name)
    await attack.lasts(0, 3)
    await attack.cluster.kill_hbase("thrift")
    await attack.cluster.start_hbase("thrift")
    await attack.works_on()
    await _start_again(attack, name)


async def master_dies(attack: Attack) -> None:
    """Kill the master; the region servers continue without it."""
    attack.note("the master is killed")
    await attack.cluster.kill_hbase("master")
    await attack.works_on()
    await _start_again(attack, "master")


async def data_node_dies(attack: Attack) -> None:
    """Kill one of three data nodes; until it is back, writes have two copies."""
    await _data_nodes_die(attack, 1)


async def two_data_nodes_die(attack: Attack) -> None:
    """Kill two of three data nodes at once; until they are back, writes have one copy."""
    await _data_nodes_die(attack, 2)


async def _data_nodes_die(attack: Attack, count: int) -> None:
    hbase = attack.cluster.hbase
    assert isinstance(hbase, HBaseServers)
    names = attack.rng.sample(hbase.data_nodes, count)
    attack.note(f"{' and '.join(names)} are killed" if count > 1 else f"{names[0]} is killed")
    for name in names:
        await attack.cluster.kill_hbase(name)
    await attack.works_on()
    for name in names:
        await _start_again(attack, name)


async def _start_again(attack: Attack, *names: str) -> None:
    """Start the killed processes and wait until HBase is healthy: it survives one fault at a time."""
    for name in names:
        await attack.cluster.start_hbase(name)
    hbase = attack.cluster.hbase
    assert isinstance(hbase, HBaseServers)
    await trio.to_thread.run_sync(hbase.wait_well)


async def _of_messages(attack: Attack) -> tuple[HBaseServers, str]:
    hbase = attack.cluster.hbase
    assert isinstance(hbase, HBaseServers)
    return hbase, await hbase.serving(attack.cluster.table_prefix + "messages")


# --- clocks, and where topics are ----------------------------------------------------------------


async def wrong_clock(attack: Attack) -> None:
    """Make an instance's clock jump, and jump back."""
    await clock_jumps(attack.rng.choice((-HOUR_S, -5, 5, HOUR_S)))(attack)


def clock_jumps(ahead_s: int) -> Fault:
    """Return a fault that makes an instance's clock jump by this much, and jump back."""

    async def jump(attack: Attack) -> None:
        instance = attack.rng.choice(attack.cluster.instances)
        attack.note(f"the clock of {instance.name} jumps by {ahead_s} s")
        instance.set_clock(ahead_s)
        await attack.lasts(1.5, 5)
        instance.set_clock(0)

    return jump


async def move(attack: Attack) -> None:
    """Pin a topic to an instance, and remove the pin."""
    instance = attack.rng.choice(attack.cluster.instances)
    topic = attack.rng.choice(attack.stage.topics)
    attack.note(f"{topic} is pinned to {instance.name}")
    await _order(attack, "PUT", f"/v1/cluster/pins/ring/{topic}", {"instance": instance.name})
    await attack.lasts(0.5, 3)
    await _order(attack, "DELETE", f"/v1/cluster/pins/ring/{topic}")


async def drain(attack: Attack) -> None:
    """Drain an instance, and end the drain."""
    instance = attack.rng.choice(attack.cluster.instances)
    attack.note(f"{instance.name} is drained")
    await _order(attack, "PUT", f"/v1/cluster/instances/{instance.name}/drain")
    await attack.lasts(1, 4)
    await _order(attack, "DELETE", f"/v1/cluster/instances/{instance.name}/drain")


async def _order(attack: Attack, method: str, path: str, value: object = None) -> None:
    """Repeat the request until it succeeds."""
    async with attack.stage.voice(attack.rng.randrange(1 << 30)) as voice:
        with trio.fail_after(PATIENCE_S):
            while True:
                try:
                    await voice.tell(method, path, value)
                except (NotSent, Doubt, Refused):
                    await trio.sleep(0.2)
                else:
                    return


#: Further faults, for instances with front ends.
OF_FRONT_ENDS: tuple[Fault, ...] = (front_end_dies, front_end_freezes, owner_process_dies, whole_pause)
#: Further faults, for links that go through proxies.
OF_LINKS: tuple[Fault, ...] = (unheard_link, no_links)
#: Faults that can be injected into every cluster.
ALL: tuple[Fault, ...] = (
    *(kill, restart, pause, long_pause, lossy_gateway, no_gateway, no_zookeeper),
    *(gateway_dies, hbase_dies, hbase_freezes, wrong_clock, move, drain),
)
