#!/usr/bin/env bash
# webdataset 1.0.2: with shardshuffle, each epoch has its shards in the same order.
#
# Guess: WebDataset(urls, shardshuffle=100) gives another order of shards in each epoch, as
#   shuffle(1000) of samples does.
# Seen: the order is drawn anew in each epoch from a generator with the same seed, so it is one order
#   for the whole run, and with split_by_node each rank has the same shards in it. Samples that are
#   far from one another in it never meet in a buffer, in any epoch. detshuffle=True changes it.
# Here: each epoch of a source has an order of its own, drawn from seed and epoch
#   (megatron/blending/order).
set -euo pipefail
pins=(webdataset==1.0.2 numpy==2.4.6)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environment=${FINDINGS_CACHE:-$scratch}/$(IFS=+; echo "${pins[*]}")
if [ ! -e "$environment/ready" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${pins[@]}"
    touch "$environment/ready"
fi
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
cat >"$scratch/webdataset_shards_in_one_order.py" <<'PYTHON'
import io
import tarfile
import webdataset

urls = [f"{number}.tar" for number in range(8)]
for number, url in enumerate(urls):
    with tarfile.open(url, "w") as tar:
        for sample in range(5):
            member = tarfile.TarInfo(f"{number}{sample}.txt")
            member.size = 2
            tar.addfile(member, io.BytesIO(b"%d%d" % (number, sample)))


def shards(dataset, num_epochs):
    orders = []
    for _ in range(num_epochs):
        keys = [sample["__key__"] for sample in dataset]
        orders.append([key[0] for key in keys[::5]])
    return orders


plain = shards(webdataset.WebDataset(urls, shardshuffle=100), 4)
changing = shards(webdataset.WebDataset(urls, shardshuffle=100, detshuffle=True, seed=1), 4)
samples = webdataset.WebDataset(urls, shardshuffle=False).shuffle(1000)
of_samples = [[sample["__key__"] for sample in samples] for _ in range(2)]
print("shards of four epochs:", plain)
print("with detshuffle:", changing)
assert all(sorted(order) == sorted("01234567") for order in plain)
assert plain[0] == plain[1] == plain[2] == plain[3]
assert changing[0] != changing[1] and of_samples[0] != of_samples[1]
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore webdataset_shards_in_one_order.py
