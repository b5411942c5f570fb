#!/usr/bin/env bash
# lm-eval 0.4.13: perplexity of a Llama counts how likely a start token is after a start token.
#
# Guess: loglikelihood_rolling sums the text's tokens, the first one after the start token.
# Seen: the tokenizer begins the text with the start token, and a start token is set before that. Its
#   log-probability after itself, which no training has ever seen, is in the sum: -5.7 of -23.2 here
#   for a model that knows nothing, more for one that does. It is in the perplexity per word and byte
#   of each document, most in short ones. Tokenizers without a start token (Qwen) are not affected, so
#   numbers of both kinds do not compare. add_bos_token=False leaves it out.
# Here: evaluation counts trained tokens alone (docs/reference/metrics.md).
set -euo pipefail
pins=(torch==2.13.0 transformers==5.24.0 lm-eval==0.4.13 accelerate==1.15.0 peft==0.21.2)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environment=${FINDINGS_CACHE:-$scratch}/$(IFS=+; echo "${pins[*]}")
if [ ! -e "$environment/ready" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${pins[@]}"
    touch "$environment/ready"
fi
export CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
cat >"$scratch/lm_eval_counts_the_start_token.py" <<'PYTHON'
import tokenizers
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

transformers.logging.set_verbosity_error()
text = "hello the sea and the sun"
alone = tokenizers.Tokenizer(tokenizers.models.BPE())
alone.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
special = ["<s>", "</s>"]
trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300, initial_alphabet=alphabet, special_tokens=special
)
alone.train_from_iterator([text], trainer)
alone.post_processor = tokenizers.processors.TemplateProcessing(
    single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
)
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=alone, bos_token="<s>", eos_token="</s>"
)
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=4, bos_token_id=0, eos_token_id=1,
)).eval()


def rolling(**options):
    reader = HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=1, **options)
    request = Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0)
    return reader.loglikelihood_rolling([request], disable_tqdm=True)[0]


ids = tokenizer.encode(text, add_special_tokens=False)


def log_probability(context, tokens):
    with torch.no_grad():
        logits = model(torch.tensor([context + tokens])).logits[0].double().log_softmax(-1)
    return sum(logits[len(context) - 1 + at, token].item() for at, token in enumerate(tokens))


expected, doubled = log_probability([0], ids), log_probability([0], [0, *ids])
seen, without = rolling(), rolling(add_bos_token=False)
print(f"{len(ids)} tokens: {expected:.3f} by hand; lm-eval {seen:.3f}, which is that of a start token and "
      f"the text after a start token ({doubled:.3f}); add_bos_token=False {without:.3f}")
assert abs(seen - doubled) < 1e-3 and abs(seen - expected) > 3 and abs(without - expected) < 1e-3
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore lm_eval_counts_the_start_token.py 2>/dev/null
