"""Run a command in an emulated cluster, and break a node in the middle of it.

``break_cluster.py NODE FAULT LINE BYTES COMMAND...``: when COMMAND has printed a line that holds
LINE, and the switch has then sent the node so many BYTES, comes the FAULT: cut, kill or
slow:RATE; with +restore the link is back when COMMAND has printed its next line.
Rank counts are those of COMMAND.  The last line is JSON: when the fault came and when COMMAND
ended, in seconds, and its exit status.
"""
import json
import subprocess
import sys
import threading
import time

from bench.cluster import faults
from bench.instruments.wire import read_counters

node, fault, awaited, size, *command = sys.argv[1:]
node, size = int(node), int(size)
fault, _, then = fault.partition("+")
port, begun, broken = f"node-{node}", time.monotonic(), []


def break_after(sent: int) -> None:
    while read_counters(port)[2] < sent:
        time.sleep(0.01)
    broken.append(time.monotonic() - begun)
    faults.main([fault.partition(":")[0], str(node), *filter(None, [fault.partition(":")[2]])])


process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
breaking = None
for line in process.stdout:
    print(line, end="", flush=True)
    if broken and then:
        faults.main([then, str(node)])
        then = ""
    if breaking is None and awaited in line:
        breaking = threading.Thread(target=break_after, args=(read_counters(port)[2] + size,),
                                    daemon=True)
        breaking.start()
status = process.wait()
print(json.dumps({"broken": broken, "ended": time.monotonic() - begun, "status": status}),
      flush=True)
