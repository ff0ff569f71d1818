"""Feeds broken files to the topology readers: each must read or refuse them, quickly.

    python bench/fuzz_readers.py --seconds 300            # each reader five minutes
    python bench/fuzz_readers.py --seconds 10 nvidia_smi  # one of them, shortly

Small right files are mutated: cut, doubled, shuffled, with digits, NaN, markup and bytes put in.
Anything but an answer or an InputError of one line, or more than SLOW_S for one file, is printed
with the seed that makes it again, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
import traceback

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology.cluster_text import make_cluster
from claw_plan.profiles.topology.recognise import read_text
from claw_plan.profiles.topology.source import Source, decode

SLOW_S = 5.0
MEMORY_BYTES = 4 << 30

SEEDS = {
    "nvidia_smi": "\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\n"
    "GPU0\t X \tNV12\tPIX\t0-15\t0\nGPU1\tNV12\t X \tSYS\t16-31\t1\n"
    "NIC0\tPIX\tSYS\t X \t\t\n\nLegend:\n  X = Self\n  NV#  = x\nNIC Legend:\n  NIC0: mlx5_0\n",
    "rocm_smi": "==== Link Type between two GPUs ====\n       GPU0   GPU1\nGPU0   0      XGMI\n"
    "GPU1   XGMI   0\n==== Numa Nodes ====\nGPU[0]\t: (Topology) Numa Node: 0\n",
    "nccl_xml": '<system version="1">\n<cpu numaid="0">\n<pci busid="0000:1a:00.0" '
    'class="0x030200" link_speed="16 GT/s" link_width="16"><gpu dev="0" sm="80" rank="0">'
    '<nvlink target="0000:1b:00.0" count="12" tclass="0x030200"/></gpu></pci>\n<nic><net '
    'name="mlx5_0" speed="200000"/></nic></cpu></system>\n',
    "nccl_log": "n1:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB ; OOB eth0:1<0>\n"
    "n1:1:2 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1a000 - Init COMPLETE\n"
    "n1:1:2 [0] NCCL INFO GPU/1A000 :GPU/1A000 (0/5000.0/LOC) GPU/1B000 (1/40.0/NVL) NET/0 "
    "(3/24.0/PHB)\nn1:1:3 [1] NCCL INFO Channel 00 : 0[0] -> 1[1] via P2P/IPC\n",
    "bench_log": "all_reduce_perf\n#  Rank  0 Group  0 Pid 1 on n1 device  0 [0x8d] NVIDIA H100\n"
    "#  size  count  type  redop  root  time  algbw  busbw #wrong  time  algbw  busbw #wrong\n"
    "  1024  256  float  sum  -1  18.6  1.7  3.0  0  17.9  1.8  3.2  0\n"
    "busbw: 1002.97  Gbps\n|    32KB |   0.92GBps |   0.52GBps |\n",
    "hostfile": "node1 slots=8 # head\nme@node2 slots=8 max_slots=8\nnode3:4\n",
    "slurm": "SLURM_JOB_NODELIST=n[1-2,08-10]\nSLURM_GPUS_PER_NODE=h100:8\na,b[1-3]-x[2,4]\n",
    "galvatron": '{"allreduce_size_8_consec_1": 154.2,\n "pp_size_2": 7.6,\n '
    '"allreduce_size_8_1MB_time": 0.07, "overlap_coe": 1.1}',
    "calculon": '{"matrix": {"float16": {"tflops": 312}}, "mem1": {"GiB": 80, "GBps": 2048},\n'
    '"networks": [{"bandwidth": 300, "size": 8, "latency": 0.00001}]}',
    "proteus": '{"n_node": 2, "n_gpu_per_node": 8, "gpu_gflops": 15700, "gpu_memory": 16000,\n'
    '"gpu_memory_bw": 900, "gpu_to_gpu": 48, "inter_node": 7}',
    "astra_sim": "topology: [ Switch, Ring ]\nnpus_count: [ 8, 2 ]\nbandwidth: [ 400.0, 50 ]\n"
    "latency: [ 936.25, 500 ]\n",
    "sailor": '{"z-a": {"A100-40": {"4": {"z-a": {"A100-40": {"4": [[0.1, 2.0], [1.0]]}}}}}}',
    "htsim": "Nodes 8\nTiers 1\nPodsize 4\nTier 0\nDownlink_speed_Gbps 200\n",
}
INSERTS = (
    "9" * 1_000_000, "NaN", "-1", "1e999", "\x00", "\x1b[31m", "<!DOCTYPE a [<!ENTITY b 'c'>]>",
    "&b;", "\ufeff", "[[[[", "{" * 200, "}" * 200, "GPU1023", "GPU99999", "X\tX\tX", "\r", "\n\n",
    "n[0-99999999]", "n[1-9][1-9][1-9][1-9][1-9][1-9]", "slots=", "=" * 300, " " * 20_000,
    "a: &x [*x, *x]\n", "\\tGPU0\\n", "\u2502", "GPU0", "NV", "0000:0c:00.0", "NCCL INFO ",
    "|" * 5000, "1." * 10_000, ",", ";", '"', "true", "null",
)  # fmt: skip


def mutated(text: str, chance: random.Random) -> str:
    """The text after one to eight random damages."""
    for _ in range(chance.randint(1, 8)):
        place = chance.randrange(len(text) + 1)
        end = min(len(text), place + chance.randint(1, 30))
        match chance.randrange(7):
            case 0:
                text = text[:place] + text[end:]
            case 1:
                text = text[:place] + chance.choice(INSERTS) + text[place:]
            case 2:
                text = text[:place] + text[place:end] * chance.randint(2, 40) + text[end:]
            case 3:
                lines = text.split("\n")
                chance.shuffle(lines)
                text = "\n".join(lines)
            case 4:
                text = text[:place]
            case 5:
                letter = chr(chance.choice((chance.randrange(32, 127), chance.randrange(0x3000))))
                text = text[:place] + letter + text[place + 1 :]
            case _:
                text = text + "\n" + chance.choice(list(SEEDS.values()))
    return text[:3_000_000]


def try_one(text: str) -> str:
    """What is wrong with how this text was treated; '' for nothing."""
    start = time.process_time()
    try:
        readings = read_text(Source("f", decode(text.encode("utf-8", "surrogatepass"), "f")))
        make_cluster(readings, gpus_per_node=8)
    except InputError as error:
        if "\n" in str(error) or len(str(error)) > 2000:
            return f"a message of several lines or of {len(str(error))} letters"
    except Exception:
        return traceback.format_exc(limit=-4)
    taken = time.process_time() - start
    return f"{taken:.1f} s for {len(text)} letters" if taken > SLOW_S else ""


def fuzz(name: str, seconds: float, seed: int) -> tuple[int, list[str]]:
    """Files tried and what went wrong, in so many seconds."""
    tried, wrong = 0, []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and len(wrong) < 5:
        number = seed + tried
        problem = try_one(mutated(SEEDS[name], random.Random(f"{name} {number}")))
        tried += 1
        if problem:
            wrong.append(f"{name} seed {number}: {problem}")
    return tried, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("readers", nargs="*", default=list(SEEDS), metavar="READER")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    failed = False
    for name in options.readers:
        tried, wrong = fuzz(name, options.seconds, options.seed)
        print(f"{name:12} {tried:8} files, {len(wrong)} wrong", flush=True)
        for problem in wrong:
            print(problem)
        failed |= bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
