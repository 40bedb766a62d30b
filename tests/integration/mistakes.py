"""Deliberate mistakes on the command line, and the sentence that answers each; the exit code is 2.

A case has the text after `anlit`, typed in the folder of test_mistakes.py. The sentence matches its
regular expression.
"""

FIT = "fit --config tiny.yaml"
CONTINUED = "fit --config run/config.yaml --run_dir new --ckpt_path run/checkpoints/last.ckpt"
CALLBACK = "--trainer.val_check_interval 1 --trainer.callbacks+"
MONITOR = "--trainer.callbacks.monitor"
EVERY = "--trainer.callbacks.every_n"
DEMO = "lightning.pytorch.demos.boring_classes.Boring"
SCALE_INVARIANT = f"{FIT} --model.attention=ScaleInvariant"

FAST = [
    (
        "fit",
        r"needs --data \(SlimPajama, .*\) and --model \(GPT, NGPT or AnGPT\): give it in a --co",
    ),
    (
        "fit --model.d_model 64 --data.path data",
        r"error: anlit fit needs --model \(GPT, NGPT or AnGPT\): give it in",
    ),
    (
        f"{FIT} --model.optimizer.lr high",
        r"model\.optimizer\.lr=high is of the wrong type: give a number$",
    ),
    (
        "fit --config three.yaml",
        r"three\.yaml cannot be read \(trainer is int in place of dict or str\): correct",
    ),
    (f"{FIT} --seed_everything -1", r"seed_everything=-1 is out of range: give 0 to 4294967295"),
    (
        f"{FIT} --model=AnGPT --model.silu_std .inf",
        r"model\.silu_std=inf is out of range: give a finite number, mor",
    ),
    (
        f"{FIT} --trainer.max_steps 0",
        r"trainer\.max_steps=0 is out of range: give 1 or more, or -1 for no limit$",
    ),
    (
        f"{FIT} --trainer.max_step 5",
        r"--trainer\.max_step is not an option of anlit fit: did you mean --trainer\.max_",
    ),
    (
        f"{FIT} --max_steps 5",
        r"--max_steps is not an option of anlit fit: did you mean --trainer\.max_steps\?$",
    ),
    (
        f"{FIT} --batch_size 5",
        r"--batch_size is not an option of anlit fit: did you mean --data\.batch_size\?$",
    ),
    (
        f"{FIT} --lr 1",
        r"--lr is not an option of anlit fit: did you mean --model\.optimizer\.lr\?$",
    ),
    (
        f"{FIT} --trainer.max_steps -1",
        r"max_steps=-1 gives the run no length: set trainer\.max_epochs, max_tokens or tokens_per",
    ),
    (
        f"{FIT} --trainer.strategy ddp_spawn",
        r"trainer\.strategy=ddp_spawn starts ranks that a signal .* set --trainer\.strategy ddp$",
    ),
    (
        f"{FIT} --trainer.devices x",
        r"trainer\.devices=x is not a number of devices: give 1 or more",
    ),
    (
        f"{FIT} --data.path beyond",
        r"beyond/train is damaged \(it has token 4,9.*vocabulary has 320\)",
    ),
    (
        "fit --config tab.yaml",
        r"tab\.yaml cannot be read \(line 2 has a tab where YAML takes spaces\): correct it there$",
    ),
    ("size run", r"anlit size does not know what to do with run: give --config FILE, such as run/"),
    (
        "prepare TextFiles --source texts --output new",
        r"1 different .* out of 1, and training and validation need a document each: write each",
    ),
    (
        "prepare TextFiles --source texts --tokenizer gpt2 --vocab_size 9",
        r"--vocab_size 9 is of --tokenizer bpe, and the tokenizer is gpt2: leave one out$",
    ),
    ("size --config tiny.yaml --mfu 0", r"--mfu 0 must be a share of the peak"),
    (
        "study --config seeded.yaml --dry_run",
        r"sets seed_everything, which its seeds set too: leave it out",
    ),
    ("study --config study.yaml --jobs 0", r"--jobs 0 must be at least 1"),
    (
        f"{FIT} --config study.yaml",
        r"study\.yaml is the plan of a study, .*: give it to anlit study --config study\.yaml$",
    ),
    (
        "study --config tiny.yaml --dry_run",
        r"tiny\.yaml configures a run and is not a plan of a study: give it to anlit fit --config",
    ),
    ("prepare TextFiles", r"TextFiles needs --source: `anlit prepare --help` explains"),
    (
        "prepare PythonSources --tokenizer gpt2",
        r"--tokenizer gpt2 means nothing for PythonSources, which takes --incl",
    ),
    (
        "score run texts/0.txt --output s.csv",
        r"--output s\.csv would hold parquet: give a name that ends in \.parquet",
    ),
    (
        "score run texts/0.txt --output texts",
        r"--output texts is a folder: give the name of a file",
    ),
    (
        "needle run --output made/a --lengths 4",
        r"4 tokens are too few for a needle .*: give --lengths of \d+ or more",
    ),
    (
        "diagnose --gaussian --output new --tokens 5",
        "--tokens is not read with --gaussian: leave it out",
    ),
    ("diagnose run --output new --draws 5", "--draws is not read without --gaussian: leave it out"),
    ("diagnose --gaussian --output new --lengths 2", r"--lengths 2 .* add one of 10 or more"),
    (
        f"{FIT} --model.attention=Foo",
        r"model\.attention names Foo, which is not a class for it: choose ALiBi.*ScaleIn",
    ),
    (
        f"{SCALE_INVARIANT} --model.attention.taux=3",
        r"attention\.taux is not a setting of .*ant: did you mean tau\?",
    ),
    (
        f"{FIT} --data.context_schedule={{a:b}}",
        r"data\.context_schedule=\{a:b\} is of the wrong type: give a mapping",
    ),
    (
        f"{FIT} --model.optimizer=AdamW",
        r"optimizer: Multiple subclasses with name AdamW\. .* torch\.optim\.A",
    ),
    (
        f"{FIT} --data.path [x]",
        r"data\.path=\['x'\] is of the wrong type: give a text, one in brackets with quotes",
    ),
    (
        f"{FIT} {CALLBACK}=EarlyStopping {MONITOR}=val/los",
        r"a callback monitors val/los, which is not logged: did you mean val/loss\?",
    ),
    (
        f"{FIT} --model {DEMO}Model",
        r"model names .*BoringModel, which is not a class for it: choose GPT, NGPT or A",
    ),
    (
        f"{FIT} --ckpt_path http://127.0.0.1:9/a",
        r"checkpoint http://127\.0\.0\.1:9/a is not on this machine: download",
    ),
    (
        f"{FIT} --data=Mixture",
        r"anlit fit needs --data\.paths: give it in a --config FILE or as an option",
    ),
    (
        "score run text --output f --batch 2",
        r"--batch is not an option of anlit score: did you mean --batch_size\?",
    ),
    ("score run", r"anlit score needs FILE and --output: anlit score --help lists the options"),
    (
        "export run there --output d",
        r"anlit export does not know what to do with there: anlit export --help lists",
    ),
    (
        "generate run --top_p",
        r"--top_p expected one argument: anlit generate --help lists the options",
    ),
    (
        "benchmark nonesuch",
        r"NAME invalid choice: 'nonesuch' \(choose from .*loss.*\): anlit bench",
    ),
    (
        "study --config high.yaml",
        r"arm 'fast' of high\.yaml: model\.optimizer\.lr=high is of the wrong type: give a num",
    ),
    (
        "runs empty",
        r"empty holds no run folder: .* give the run_dir of a training or a folder above",
    ),
    ("demo --outputs new", r"--outputs is not an option of anlit demo: did you mean --output\?"),
]
"""Cases of the fast tests."""

SLOW = [
    (
        f"{FIT} {CALLBACK}=LearningRateFinder",
        "has LearningRateFinder, which takes steps that are not the run's",
    ),
    (
        f"{FIT} {CALLBACK}=EMAWeightAveraging --trainer.callbacks.decay 1",
        r"trainer\.callbacks\.decay=1\.0 is out of range: give more than 0 and less than 1$",
    ),
    (
        f"{FIT} --config trainer/ema.yaml --config trainer/swa.yaml",
        "has EMAWeightAveraging and TailAveraging, and a run has one average of its weights: leave",
    ),
    (
        f"{FIT} --config trainer/batch_ramp.yaml --config trainer/ema.yaml "
        "--trainer.callbacks.schedule '{0: 1, 4: 4}'",
        "trainer.callbacks: Key must be a string, got: 0: anlit fit --help lists the options",
    ),
    (
        f"{FIT} --trainer.max_time 00:01:00:00 {CALLBACK}=Timer "
        "--trainer.callbacks.duration 00:02:00:00",
        "trainer.max_time and the Timer of trainer.callbacks both limit the time of a launch",
    ),
    (
        f"{FIT} --config trainer/keep.yaml --config trainer/keep.yaml",
        "has StepCheckpoints twice, and a checkpoint holds the state of one: leave one out",
    ),
    (
        f"{FIT} {CALLBACK}=StochasticWeightAveraging --trainer.callbacks.swa_lrs 0.1",
        "has StochasticWeightAveraging, which averages once an epoch, .* as trainer/swa.yaml does",
    ),
    (
        f"{FIT} {CALLBACK}=TailAveraging --trainer.callbacks.share 2",
        r"TailAveraging has share=2\.0: give more than 0, at most 1$",
    ),
    (
        f"{FIT} {CALLBACK}=EMAWeightAveraging --trainer.callbacks.update_starting_at_step 99",
        "update_starting_at_step=99 averages nothing, because the last of the run's 40 steps is",
    ),
    (
        f"{FIT} --trainer.strategy ModelParallelStrategy",
        "would average no gradients: set --trainer.strategy anlit",
    ),
    # the command itself
    ("trian --config tiny.yaml", r"unknown command 'trian': choose one of demo, prepare, fit"),
    (
        "generate run hello --import nowhere",
        r"--import nowhere fails .* a file in this folder or PYTHONPATH",
    ),
    # configurations of fit
    (
        "fit --config cut.yaml",
        r"cut\.yaml cannot be read \(while parsing a flow node .*\): correct it there",
    ),
    ("fit --config run", r"run is a folder: give a YAML file"),
    (
        f"{FIT} --model.n_layer 1",
        r"model\.n_layer is not a setting of anlit\.GPT: did you mean n_layers\?",
    ),
    (f"{FIT} --model.n_heads 3", r"choose a d_model that is a multiple of 3, or another n_heads"),
    (
        f"{FIT} --model.attention.tau 3",
        r"attention\.tau is not a setting of anlit\.Plain: the class has none",
    ),
    (
        f"{FIT} --config trainer/1gpu.yaml",
        r"needs a GPU, and none was found: set --trainer\.accelerator cpu",
    ),
    (
        f"{FIT} --trainer.devices 0",
        r"trainer\.devices=0 is out of range: give 1 or more, or -1 for all devices",
    ),
    (
        f"{FIT} --trainer.max_steps 1.5",
        r"trainer\.max_steps=1\.5 is of the wrong type: give an integer",
    ),
    (f"{FIT} --trainer.max_time -5", r"trainer\.max_time is not a duration: give DD:HH:MM:SS"),
    (f"{FIT} --trainer.precision 17", r"trainer\.precision=17 .*: set 32-true, bf16-mixed"),
    (
        f"{FIT} --trainer.logger CSVLogger",
        r"anlit fit needs --trainer\.logger\.save_dir: give it in a --config FILE",
    ),
    (
        f"{FIT} {CALLBACK}=ModelCheckpoint {EVERY}_epochs 1 {EVERY}_train_steps 1",
        r"Combination of parameters every_n_train_steps=1, .* should be mutually exclusive\.$",
    ),
    (f"{FIT} --data.path nowhere", r"there is no nowhere/manifest\.json: set --data\.path"),
    (
        f"{FIT} --data.path swapped",
        r"tokenizer\.json is not the tokenizer that made the tokens .* put the right file",
    ),
    (f"{FIT} --data.batch_size 0", r"data\.batch_size=0 is out of range: give 1 or more"),
    (
        f"{FIT} --ckpt_path empty",
        r"ckpt_path=empty is not a checkpoint: give a run folder, a file such",
    ),
    (
        f"{FIT} --ckpt_path cut.ckpt",
        r"ckpt_path=cut\.ckpt is damaged .* start again in another --run_dir",
    ),
    (
        f"{FIT} --ckpt_path run/checkpoints/last.ckpt",
        r"holds AnGPT, but the configuration's model is GPT",
    ),
    (f"{CONTINUED} --data.path other", r"was trained with another tokenizer"),
    (f"{FIT} --run_dir empty.txt", r"run_dir=empty\.txt cannot be written .* choose a folder"),
    (
        f"{FIT} --model.positions=RoPE --model.positions.fraction=0.1",
        r"positions\.fraction=0\.1.*even",
    ),
    (f"{FIT} --model.context_length=10000000", r"10000000.*--model\.context_length"),
    # evaluation of a run
    (
        "validate --config tiny.yaml",
        r"finds no best\.ckpt or last\.ckpt in checkpoints or new/checkpoints: give a tr",
    ),
    (
        "validate --config run/config.yaml --ckpt_path exported",
        r"is an exported model.* use anlit lengths",
    ),
    (
        "validate --config run/config.yaml --ckpt_path hf",
        r"hf was written for transformers .* take the run folder or the checkpoint",
    ),
    (
        "fit --config run/config.yaml --run_dir new --ckpt_path exported",
        r"exported is an exported model.* begin a run from it with --initial_weights exported",
    ),
    (
        "test --config tiny.yaml --ckpt_path=last",
        r"finds no last\.ckpt .*give a trained run, anlit test RUN, or",
    ),
    (
        "test --config run/config.yaml --ckpt_path registry:a/b",
        r"the checkpoint registry:a/b is not on this machine",
    ),
    # size
    ("size", r"needs a model: give the options of anlit fit"),
    (
        "size --config tiny.yaml --json /proc/size.json",
        r"--json /proc/size\.json cannot be written .* another file",
    ),
    # studies
    (
        "study --config sections.yaml --dry_run",
        r"the section 'nonesuch': choose one of convergence, tuning",
    ),
    (
        "study --config after.yaml --dry_run",
        r"lengths: anlit lengthz .* not a command of anlit's: give one such as",
    ),
    (
        "study --config study.yaml --output /proc/study",
        r"--output /proc/study cannot be made .* writable folder",
    ),
    (
        "study --config study.yaml --output nowhere --report_only",
        r"finds no folder nowhere: give --output",
    ),
    # preparing data
    ("prepare Nonesuch", r"CORPUS invalid choice: 'Nonesuch' \(choose from 'SlimPajama'"),
    (
        "prepare TextFiles --source nowhere --output new",
        r"No file matches \*\*/\*\.txt in .*nowhere: set --source",
    ),
    (
        'prepare TextFiles --source texts --pattern ""',
        r"No file matches  in .*texts: set --source .*, --pattern",
    ),
    (
        "prepare Hub --repo c4 --files *.parquet",
        r"--repo c4 is not a dataset of the hub: give owner/name",
    ),
    (
        "prepare Hub --repo allenai/c4",
        r"Hub needs --repo and --files: `anlit prepare --help` explains",
    ),
    (
        "prepare FineWeb --workers 2 --cluster tcp://a:1",
        r"--workers counts processes of this machine, and --cluster",
    ),
    (
        "prepare TextFiles --source texts --val_fraction 1",
        r"val_fraction=1\.0 holds out no document or all: set it",
    ),
    (
        "prepare SlimPajama --output new --source texts --tokenizer gpt3",
        r"there is no tokenizer at gpt3",
    ),
    ("prepare FineWebBin --source texts --tokenizer bpe", r"--tokenizer bpe is for text"),
    # after training
    ("generate nowhere hello", r"nowhere does not exist: give a run folder"),
    ("generate hf hello", r"hf was written for transformers .* take the run folder or the checkp"),
    ("generate run hello --device warp", r"--device warp cannot be used here: choose auto, cpu"),
    (
        "generate run --prompts bad.jsonl",
        r"bad\.jsonl, line 1: the line is not JSON .* leave it out",
    ),
    ("score run texts --output s.parquet", r"texts is a folder: give a file of text"),
    (
        "score run texts/0.txt --output s.parquet --stride 100",
        r"--stride 100 must be between 1 and the window's 16",
    ),
    ("export run --output run", r"--output run is not an empty folder: choose a new name"),
    ("import exported --output new", r"exported is in anlit's own form, and needs no import: give"),
    ("compare exported --output new", r"holds no run folder.* give the run_dir of a training"),
    (
        "compare run --output new --baseline nonesuch",
        r"give a run folder or one of the labels 'anGPT, plain'",
    ),
    (
        "lengths run --output new --lengths 16,",
        r"--lengths invalid numbers value: '16,': anlit lengths --help lists",
    ),
    (
        "lengths run --output new --data other",
        r"trained with another tokenizer .* set --data to shards of that",
    ),
    ("diagnose --output new", r"takes one run folder or \.ckpt file, or --gaussian"),
]
"""Cases of the slow tests."""
