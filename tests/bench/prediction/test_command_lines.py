"""Command lines of `plan`, `dry`, `predict` and `schedule`: what is printed and refused."""
import re

import pytest

from bench.__main__ import main
from support import ROOT, status_of

LAYERS = "dry --ranks 8 --hidden 64"
STAGES = "dry --hidden 256 --layers 8 --batch 16 --seq 64 --ranks 8"
SMALL = "dry --ranks 4 --hidden 256 --layers 4 --heads 4 --batch 8 --seq 64"
CONTEXT = ("dry --scheme 1d --hidden 64 --heads 4 --layers 4 --batch 4 --seq 32 --ranks 8 "
           "--stages 2")
EXPERTS = "plan --ranks 4 --layers 4 --hidden 64 --heads 4 --batch 8 --seq 16 --experts 4"
GPUS = "plan --machine dgx-a100"
ZB = "schedule --schedule zb-h1 --stages 3 --microbatches 4"
PRINTED = [
    (f"{EXPERTS} --expert-top 1 --top 2", ["4 experts in one of 2 layers, top 1"]),
    (f"{EXPERTS} --stages 2 --top 1 --recompute full", ["2 stages, 4 micro-batches"]),
    ("plan --ranks 4 --hidden 64 --layers 1 --top 1", ["fits without", "an optimizer"]),
    ("dry --ranks 4 --scheme 1d --hidden 64 --layers 1 --machine dgx-h100",
     ["fits without an optimizer into"]),
    ("plan --ranks 4 --hidden 64 --heads 4 --layers 1 --batch 4 --seq 8 --top 1 --costs",
     ["counted and printed costs", "0.5000", "Left out: 3d: ", "One Transformer layer",
      "counted on every rank"]),
    ("plan --ranks 16 --hidden 256 --layers 8 --batch 64 --seq 64 --stages 2 --data 4 --top 2",
     ["sums ms", "4 replicas of 2 stages, 4 micro-batches, ZeRO 0"]),
    (f"{CONTEXT} --context 2 --data 2 --zero 3 --microbatches 2",
     ["4 replicas, AdamW, by stage of ZeRO", "4 replicas of grid 1, rank 0 of 8"]),
    ("plan --hidden 64 --heads 4 --layers 4 --batch 4 --seq 32 --ranks 8 --stages 2 --context 2 "
     "--top 2", ["2 replicas of 2 stages"]),
    ("plan --contexts 2 --model llama-3-8b --machine dgx-h100 --seq 8192",
     ["predicted and not measured", "closed form"]),
    ("dry --ranks 2 --scheme 1d --batch 2 --seq 8 --model mixtral-8x7b", ["experts"])]


@pytest.mark.parametrize("line, said", PRINTED)
def test_what_is_counted_and_planned_is_printed(line, said, capsys):
    assert main(line.split()) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert all(text in told for text in said), told
    assert "--experts" not in line or "lower bound for the products" not in told


# A file of a model, options, what is printed, and an option of the best plan.
BEST = [
    ("layers = 2\nseq = 16384", "--gpus 4 --batch 1", ["+ context", "contexts of more than 16"],
     "--recompute"),
    pytest.param("layers = 4\nseq = 128", "--gpus 4 --batch 4 --experts 4 --expert-every 2",
                 ["experts on"], "--experts", marks=pytest.mark.slow)]


@pytest.mark.parametrize("sizes, options, said, taken", BEST)
def test_dry_takes_the_best_plan_as_it_is_printed(sizes, options, said, taken, tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text(f'name = "mine"\nhidden = 256\nheads = 4\nvocab = 512\n{sizes}\n')
    assert main(f"plan --machine dgx-a100 --model {path} {options}".split()) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert all(text in told for text in said)
    line = re.search(r"python -m bench (dry .*?) - mpirun", told)[1]
    assert taken in line.split() and main(line.split()) == 0


REFUSED = [
    # Layers on grids.
    (f"{LAYERS} --grid 3x2x1", "a grid of 3 x 2 x 1 has 6"),
    (f"{LAYERS} --grid banana", "such as 2x2x2, or auto"),
    ("dry --ranks 9 --hidden 64 --scheme 2d --rank 9", "rank 9 of 9"),
    (f"{LAYERS} --scheme 1d --keep both", "'keep'"),
    (f"{LAYERS} --scheme 2d --grid auto", "8 ranks are no square: start 4 or 9"),
    ("plan --ranks 8 --hidden 65 --heads 4", "must be a multiple of --heads 4"),
    (f"{LAYERS} --scheme 4d", "scheme '4d' is unknown"),
    ("plan --ranks 1 --hidden 64", "at least 2 ranks"),
    ("plan --ranks 8 --hidden 64 --machine abacus", "'abacus' is unknown"),
    ("plan --ranks 8 --hidden 64 --machine no.toml", "machine file no.toml"),
    *((f"{verb} --stages 1000000000", "at most 262144 would do") for verb in (
        "plan --ranks 1000000 --hidden 64", "predict", "dry --ranks 1000000 --hidden 64")),
    (f"{LAYERS} --memory {'9' * 400}GB", "no size of"),
    ("dry --ranks 8 --scheme 1d", "--model llama-3-8b"),
    # Trainings.
    (f"{GPUS} --gpus 8 --model llama-3-71b --batch 8", "did you mean llama-3-70b"),
    (f"{GPUS} --gpus 8 --model llama-3-70b", "--batch is missing"),
    (f"{GPUS} --gpus 7919 --model llama-3-70b --batch 8", "such as 4096 would do"),
    (f"{GPUS} --gpus 8 --model gpt-3-175b --batch 1", "no plan fits 74.5 GiB a GPU"),
    (f"{GPUS} --gpus 1 --model gpt2 --batch 100003", "so a smaller batch may do too"),
    (f"{GPUS} --gpus 7919 --model gpt2 --batch 1", "such as 1024 would do"),
    (f"{GPUS} --map 7919 --model gpt2 --batch 8", "such as 512 would do"),
    (f"{GPUS} --map 1,2 --model gpt-3-175b --batch 8", "--map 1,2: no plan on any of these, the "
     "last: --gpus 2 --model gpt-3-175b: no plan fits"),
    (f"{GPUS} --gpus 8 --model none.toml --batch 8", "there is no such file"),
    (f"{GPUS} --gpus 8 --model gpt-3-175b --batch 8 --zero 1", "--zero 1"),
    (f"{GPUS} --ranks 8", "--hidden is missing"),
    (f"{GPUS} --hide-sums", "--gpus is missing"),
    (f"{GPUS} --gpus 7919 --model llama-3-8b --batch 7", "that divide the batch"),
    ("plan --gpus 8 --model llama-3-8b --batch 8 --machine longhorn --dtype bfloat16",
     "no rate for bfloat16"),
    ("plan --gpus 8 --model llama-2-7b --batch 8 --context 2",
     "--context 2: with --gpus the plan says it"),
    ("plan --gpus 8 --model gpt-3-175b --batch 8 --expert-top 2", "--experts 8 would do"),
    *((f"plan --gpus 8 --batch 8 --model llama-3-8b --experts 8 {more}",
       "trainings are planned with experts as wide as")
      for more in ("--expert-width 96", "--shared-expert 96")),
    ("plan --rules --gpus 8", "--gpus 8: the rules of --rules overview say it"),
    ("plan --map 8,16 --batch 8", "--model is missing"),
    ("plan --map 8,2000000 --batch 8 --model llama-2-7b", "--map 2000000: at most"),
    ("plan --map 8 --batch 8 --model llama-2-7b --zero 1", "--zero 1: "),
    ("plan --contexts 2 --model llama-3-8b --batch 2",
     "--batch 2: with --contexts one sequence"),
    ("plan --contexts 2 --model llama-3-8b --seq 1",
     "--seq 1 positions cannot be divided by --context 2"),
    ("plan --contexts 2 --model mixtral-8x7b",
     "--context 2 divides sequences, which experts route"),
    ("plan --contexts 1,2 --model llama-3-8b", "numbers from 2 to 1024 would do"),
    # Options of one verb that do nothing alone.
    (f"{SMALL} --vocab 512", "--vocab: give --stages too"),
    (f"{SMALL} --stages 2 --untied", "--untied: give --vocab too"),
    (f"{SMALL} --stages 2 --vocab 512 --hide-sums", "--hide-sums: give --machine too"),
    (f"{SMALL} --stages 2 --machine cpu --scheme 1d --inside y",
     "--inside y: the mesh has the directions r, d, s, x"),
    ("predict --fit 8", "--fit 8: it is of --steps"),
    ("predict --steps x.csv --table weak", "--table weak: leave it out"),
    ("predict --schedule gpipe", "--schedule gpipe: give --stages too"),
    ("predict --stages 2 --schedule 2f2b", "schedule '2f2b' is unknown"),
    ("predict --stages 2 --pictures here", "--pictures here: pictures are of rows without"),
    ("predict --data 2", "--data 2: it is of --stages: give that too"),
    ("predict --grid 2x1x1,1x2x1", "--grid 2x1x1,1x2x1: it is of --stages: give that too"),
    ("predict --stages 2 --data 4 --shards 3", "--shards 3 does not divide --data 4"),
    *((f"predict --results here {more}", f"error: {more}: leave it out: ")
      for more in ("--table strong", "--stages 2", "--pictures pics")),
    (f"predict --results {ROOT}/bench", f"no results in {ROOT}/bench"),
    ("predict --results /no/such", "such is no folder of results, and no file"),
    # Stages and replicas.
    (f"{STAGES} --microbatches 4", "--microbatches 4: give --stages too"),
    (f"{STAGES} --stages 3", "--stages 3 does not divide the 8 ranks of a replica"),
    (f"{STAGES} --stages 2 --grid 2x1x1", "grid of 2 x 1 x 1 has 2 ranks, but stage 0 has 4"),
    (f"{STAGES} --stages 2 --grid 4x1x1 --rank 8", "--rank 8: 0 to 7 would do"),
    (f"{STAGES} --stages 2 --schedule 2f2b", "schedule '2f2b' is unknown"),
    (f"{STAGES} --stages 2 --grid 4x1x1 --microbatches 3",
     "cannot be divided into 3 equal micro-batches"),
    (f"{STAGES} --stages 2 --data 2 --grid 2x1x1 --microbatches 3",
     "error: a replica's batch of 8 sequences cannot be divided into 3 equal"),
    (f"{STAGES} --zero 2", "--zero 2: give --stages too, such as --stages 1"),
    (f"{STAGES} --stages 2 --zero 2", "--zero 2: give --data too"),
    (f"{STAGES} --ranks 24 --batch 48 --stages 8 --data 3 --shards 2",
     "--shards 2 does not divide --data 3"),
    (f"{STAGES} --ranks 16 --stages 8 --data 2 --rank 16", "--rank 16: 0 to 15 would do"),
    (f"{STAGES} --data 3", "--data 3 does not divide --ranks 8, which is that of all replicas"),
    (f"{STAGES} --ranks 9 --data 3", "--data 3 does not divide --batch 16"),
    (f"{STAGES} --grid 4x1x1,1x4x1", "--grid 4x1x1,1x4x1: give --stages too, or one grid"),
    (f"{STAGES} --stages 4 --grid 2x1x1,1x2x1", "2 grids for 4 stages"),
    ("plan --ranks 4 --hidden 256 --data 4", "--data 4: give --stages too, such as --stages 1"),
    # Contexts.
    (f"{CONTEXT} --context 3", "--data 1 x --context 3 does not divide --ranks 8"),
    (f"{CONTEXT} --context-way ring",
     "--context-way ring would do nothing here: --context 2 or more"),
    (f"{CONTEXT} --context 2 --shards 3", "--shards 3 does not divide --data 1 x --context 2"),
    (f"{CONTEXT} --context 2 --seq 1", "--seq 1 positions cannot be divided by --context 2"),
    (f"{CONTEXT} --context 2 --experts 4", "--context 2 divides sequences, which experts route"),
    (f"{CONTEXT} --context 4 --shards 2 --zero 1 --stages 1 --inside r --machine longhorn",
     "--inside r with --context 4: a multiple of 4 as --shards would"),
    (f"{LAYERS} --context 2", "--context 2: give --stages too, such as --stages 1"),
    # Experts.
    (f"{EXPERTS} --data 2 --stages 1", "--data: what is planned with experts is one replica"),
    (f"{EXPERTS} --costs", "--costs: what is planned"),
    (f"{EXPERTS} --convention megablocks --capacity 0.001", "drops every one of 128 tokens"),
    (f"{EXPERTS} --stages 2 --expert-every 3", "begins with layer 2 of a model with experts"),
    (f"{EXPERTS} --expert-top 5", "--expert-top 5 experts cannot be chosen among --experts 4"),
    ("plan --ranks 4 --hidden 64 --gate switch", "--gate switch would do nothing here"),
    # Schedules.
    ("schedule --schedule zb --stages 2 --microbatches 2", "'zb' is unknown"),
    ("schedule --schedule 1f1b --stages 2", "give --microbatches too"),
    ("schedule --schedule dualpipe-v --stages 2 --microbatches 3", "at least 4 micro"),
    (f"{ZB} --kept 2", "--kept 2: a share"),
    (f"{ZB} --beside auto --max-activations 1/2", "memory for one micro-batch"),
    (f"{ZB} --picture a.bmp", "ends in .png, .svg or .pdf"),
    (f"{ZB} --beside interleaved:0", "a number of chunks of at least 1"),
    ("schedule --file /no/such/file", "no such file"), ("schedule --file /", "Is a directory"),
    ("schedule --schedule 1f1b --stages 8 --microbatches 1000000000", "at most 262144"),
    ("schedule --schedule auto --stages 1000000000 --microbatches 1", "at most 262144"),
    *((f"schedule --schedule {names} --stages 512 --microbatches 512", "at most 32768 would do")
      for names in ("auto", "1f1b --beside auto")),
    ("schedule --schedule interleaved:1000000000 --stages 2 --microbatches 2", "at most 262"),
    *((f"{ZB} --hop={word}", f"--hop: '{word}': a number of at least 0 would do")
      for word in ("nan", "inf", "abc", "-1", "1/0"))]


@pytest.mark.parametrize("line, said", REFUSED)
def test_what_cannot_be_meant_is_said_in_a_line(line, said, capsys):
    assert status_of(main, line.split()) == 2
    told = capsys.readouterr()
    assert said in told.err.splitlines()[-1] and not told.out
