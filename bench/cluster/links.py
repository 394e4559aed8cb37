"""Join nodes by a switch and links of limited rate, through netlink.

A link is a pair of virtual devices.  The kernel's token bucket filter (tbf) limits what each of
the two sends.  A bucket holds what the link carries in a millisecond, the most that passes at once
after a pause.  Devices build packets of as many frames as fit into a bucket: the filter would take
larger ones apart, and frames cost the cores several times as much as packets.  Queues hold a
second's traffic, so that nothing is dropped and sent again where many nodes send to one.
"""
from __future__ import annotations

import errno
import os
from typing import Any

from bench.cluster.spec import NETWORK, SWITCH, Cluster
from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

BURST_SECONDS = 1e-3
LEAST_QUEUE = 4 * 2 ** 20                # bytes
MTU = 1500
FRAME = MTU + 14                         # bytes of a frame with its Ethernet header
LEAST_FRAMES, MOST_FRAMES = 2, 45        # of a packet; the largest packet has 64 KiB
ANY_FRAMES = 65535                       # the limit of a new device: none
ROUNDING = 2e-6                          # seconds: the filter stores a bucket as a rounded time
SPARE = 200                              # bytes of a bucket beyond the largest packet
CONGESTION_CONTROL = "reno"
# What a queueing discipline is for, and what does without it.
FILTERS = {"tbf": ("limits the rate of a link", "unlimited links would do"),
           "netem": ("delays what a link carries", "leave the latency out")}


class Refused(Exception):
    """Something that this kernel does not have or allow; the message says what."""


def burst_frames(link: float) -> int:
    """Return how many whole frames a link of `link` bit/s passes at once after a pause."""
    return min(max(int(link / 8 * BURST_SECONDS / FRAME), LEAST_FRAMES), MOST_FRAMES)


def bucket_bytes(link: float) -> int:
    """Return the bucket size in bytes, enough for the largest packet, of a `link` bit/s link."""
    return burst_frames(link) * FRAME + SPARE + round(link / 8 * ROUNDING)


def queue_bytes(link: float) -> int:
    """Return how many bytes may queue for a link of `link` bit/s."""
    return round(min(max(link / 8, LEAST_QUEUE), 2 ** 30))


def make_switch(nodes: dict[int, int]) -> None:
    """Make the switch in this namespace, and a pair of devices for each node.

    `nodes` has the process that holds each node's namespaces: its device ``eth0`` is there.
    """
    _keep_quiet()
    with IPRoute() as net:
        _bring_up(net, "lo")
        _create_device(net, "a bridge", ifname=SWITCH, kind="bridge", br_mcast_snooping=0)
        bridge = index_of(net, SWITCH)
        for node, process in nodes.items():
            _create_device(net, "pairs of virtual devices (veth)", ifname=f"node-{node}",
                           kind="veth", mtu=MTU,
                           peer={"ifname": "eth0", "mtu": MTU, "net_ns_pid": process})
            net.link("set", index=index_of(net, f"node-{node}"), master=bridge)
        net.addr("add", index=bridge, address=f"{NETWORK}.1", prefixlen=24)
        _bring_up(net, SWITCH)


def open_ports(cluster: Cluster) -> None:
    """Limit what the switch sends to each node, and let it send."""
    with IPRoute() as net:
        for node in range(cluster.nodes):
            limit_rate(net, f"node-{node}", cluster.link)
            _bring_up(net, f"node-{node}")


def open_node(cluster: Cluster, node: int) -> None:
    """Give this namespace the address of a node, and limit and delay what it sends."""
    _keep_quiet()
    _tune_tcp()
    with IPRoute() as net:
        _bring_up(net, "lo")
        net.addr("add", index=index_of(net, "eth0"), address=cluster.address(node), prefixlen=24)
        limit_rate(net, "eth0", cluster.link, cluster.latency)
        _bring_up(net, "eth0")


def limit_rate(net: Any, name: str, link: float | None, latency: float = 0.0) -> None:
    """Limit the rate at which a device sends, in bit/s, and delay what it sends."""
    index, parent = index_of(net, name), {}
    if link is not None:
        net.link("set", index=index, gso_max_segs=burst_frames(link))
        add_filter(net, "tbf", index, handle="1:", rate=round(link / 8),
                   burst=bucket_bytes(link), limit=queue_bytes(link))
        parent = {"parent": "1:1"}
    if latency:
        add_filter(net, "netem", index, handle="2:", delay=round(latency * 1e6), limit=10 ** 6,
                   **parent)


def add_filter(net: Any, kind: str, index: int, **options: Any) -> None:
    """Add a queueing discipline to a device; `Refused` when the kernel lacks it."""
    try:
        net.tc("add", kind, index=index, **options)
    except NetlinkError as error:
        if error.code not in (errno.ENOENT, errno.EOPNOTSUPP):
            raise
        purpose, remedy = FILTERS[kind]
        raise Refused(f"this kernel has no {kind}, which {purpose} (module sch_{kind}): "
                      f"{remedy}") from error


def _create_device(net: Any, what: str, **options: Any) -> None:
    """Create a device; `Refused` when the kernel lacks such ones."""
    try:
        net.link("add", **options)
    except NetlinkError as error:
        if error.code not in (errno.EOPNOTSUPP, errno.ENODEV, errno.EPERM):
            raise
        raise Refused(f"this kernel does not let an emulated cluster make {what}: "
                      f"{os.strerror(error.code)}") from error


def index_of(net: Any, name: str) -> int:
    """Return the index of a device."""
    return net.link_lookup(ifname=name)[0]


def _bring_up(net: Any, name: str) -> None:
    """Let a device send and receive."""
    net.link("set", index=index_of(net, name), state="up")


def _tune_tcp() -> None:
    """Let connections of this namespace send as fast as the link carries.

    The system's own choice may be BBR, which sends next to nothing for 200 ms every 10 seconds,
    to measure the delay again.  Reno, which every kernel has, slows down for lost packets alone,
    and nothing is lost here.  Nor does a connection start slowly again after a pause.  Where
    ``/proc/sys`` cannot be written to, as in some containers, the system's choice stays; results
    name the algorithm that was in use.
    """
    for name, value in (("tcp_congestion_control", CONGESTION_CONTROL),
                        ("tcp_slow_start_after_idle", "0")):
        try:
            with open(f"/proc/sys/net/ipv4/{name}", "w", encoding="ascii") as file:
                file.write(value)
        except OSError:
            pass


def _keep_quiet() -> None:
    """Let devices of this namespace have no IPv6, which sends by itself."""
    for which in ("all", "default"):
        try:
            with open(f"/proc/sys/net/ipv6/conf/{which}/disable_ipv6", "w",
                      encoding="ascii") as file:
                file.write("1")
        except OSError:    # a kernel without IPv6
            continue
