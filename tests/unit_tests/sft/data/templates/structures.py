"""Short chat templates with the structure of those that model families are released with."""

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% "
    "endfor %}" + PROMPT
)
LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}
{%- set system = messages[0]['content'] %}{% else %}{% set rest = messages %}{% set system = false %}{% endif %}
{%- for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
{%- if loop.index0 == 0 and system != false %}{% set content = '<<SYS>>' + system + '<</SYS>>' + m['content'] %}
{%- else %}{% set content = m['content'] %}{% endif %}{% if m['role'] == 'user' -%}
{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% else %}
{{- ' ' + content.strip() + ' ' + eos_token }}{% endif %}
{%- endfor %}"""
LLAMA3 = """{% for m in messages %}
{%- set content = '<|start|>' + m['role'] + '<|end|>\n\n' + m['content'] | trim + '<|eot|>' %}
{%- if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"""
LLAMA31 = """{{- bos_token }}
{%- if not date is defined %}{% if strftime_now is defined %}{% set date = strftime_now('%d %b %Y') %}
{%- else %}{% set date = '26 Jul 2024' %}{% endif %}{% endif %}
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content']|trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start|>system<|end|>\n\nToday: ' + date + '\n\n' + system + '<|eot|>' }}
{%- if tools %}{% set first = messages[0]['content']|trim %}{% set messages = messages[1:] %}
{{- '<|start|>user<|end|>\n\n' -}}{% for t in tools %}{{ t | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}
{{- first + '<|eot|>' }}{% endif %}
{%- for m in messages %}{% if 'tool_calls' in m %}{% set call = m.tool_calls[0].function %}
{{- '<|start|>assistant<|end|>\n\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{ '}<|eot|>' }}
{%- elif m.role == 'tool' %}{{ '<|start|>ipython<|end|>\n\n' }}{{ m.content | tojson }}{{ '<|eot|>' }}
{%- else %}{{ '<|start|>' + m['role'] + '<|end|>\n\n' + m['content'] | trim + '<|eot|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"""
MISTRAL = """{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}
{%- else %}{{ m['content'] + eos_token + ' ' }}{% endif %}{% endfor %}"""
MISTRAL3 = """{%- if messages[0]["role"] == "system" %}{% set system_message = messages[0]["content"] %}
{%- set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{%- set users = rest | selectattr("role", "equalto", "user") | list %}
{%- for message in rest %}{% if message.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}{% endfor %}
{{- bos_token }}{% for message in rest %}{% if message["role"] == "user" %}
{%- if tools and message == users[-1] %}{{ '[TOOLS]' + tools | tojson }}{% endif %}
{%- if loop.last and system_message is defined %}
{{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
{%- else %}{{ "[INST] " + message["content"] + "[/INST]" }}{% endif %}
{%- else %}{{ " " + message["content"]|trim + eos_token }}{% endif %}{% endfor %}"""
QWEN25 = """{%- if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are kind.<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{% if m.role != 'tool' and not m.tool_calls %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant' }}{% if m.content %}{{ '\n' + m.content }}{% endif %}
{%- for call in m.tool_calls %}
{{- '\n<call>' + call.function.name + call.function.arguments | tojson + '</call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- else %}{% if (loop.index0 == 0) or (messages[loop.index0 - 1].role != 'tool') %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<response>' + m.content + '</response>' }}
{%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}{{ '<|im_end|>\n' }}{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
QWEN3 = """{%- set ns = namespace(open=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}{% set index = (messages|length - 1) - loop.index0 %}
{%- if ns.open and message.role == 'user' %}{% set ns.open = false %}{% set ns.last_query_index = index %}{% endif %}
{%- endfor %}
{%- for message in messages %}{% set content = message.content %}{% if message.role != 'assistant' %}
{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- else %}{% set reasoning_content = '' %}
{%- if message.reasoning_content is string %}{% set reasoning_content = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{%- if loop.index0 > ns.last_query_index %}
{%- if loop.last or (not loop.last and reasoning_content) %}
{{- '<|im_start|>assistant\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{ '<|im_start|>assistant\n' + content }}{% endif %}
{%- else %}{{ '<|im_start|>assistant\n' + content }}{% endif %}
{{- '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for m in messages %}{% set role = m['role'] %}{% if role == 'assistant' %}{% set role = 'model' %}{% endif %}
{{- '<start>' + role + '\n' + m['content'] | trim + '<end>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start>model\n' }}{% endif %}"""
PHI = """{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""
ZEPHYR = """{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}
{%- if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{% endfor %}"""
MARKED = (
    """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}
{%- generation %}{{ m.content }}{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}
{{- '\n' }}{% endfor %}"""
    + PROMPT
)
# As TRL marks Phi 3: the end of the text, which stands behind the last turn alone, is a mark of its
# own.
PHI_MARKED = """{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}
{%- generation %}{{ m.content + '<|end|>\n' }}{% endgeneration %}{% else %}{{ m.content + '<|end|>\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% elif messages[-1].role == 'assistant' %}
{%- generation %}{{ eos_token }}{% endgeneration %}{% else %}{{ eos_token }}{% endif %}"""
NEMO = """{{- bos_token }}{% for message in messages %}{% if message.role == 'user' %}
{{- '[INST]' + message.content + '[/INST]' }}{% elif message.tool_calls is defined %}{{ '[CALLS][' }}
{%- for tool_call in message.tool_calls %}{% if not tool_call.id is defined or tool_call.id|length != 9 %}
{{- raise_exception('call ids have length 9') }}{% endif %}{{ tool_call.function.name + ' ' + tool_call.id }}
{%- if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' + eos_token }}{% elif message.role == 'tool' %}
{%- if not message.tool_call_id is defined or message.tool_call_id|length != 9 %}
{{- raise_exception('result ids have length 9') }}{% endif %}
{{- '[RESULT]' + message.tool_call_id + ' ' + message.content + '[/RESULT]' }}
{%- else %}{{ message.content + eos_token }}{% endif %}{% endfor %}"""
# Three ends: of the last answer, of a call, and of earlier answers. Thoughts of earlier turns are
# left out, and those before a call once its answer is there.
GPT_OSS = """{{- '<|start|>system<|message|>You think.<|end|>' }}
{%- if messages[0].role == 'system' %}{% set rest = messages[1:] %}
{{- '<|start|>developer<|message|>' + messages[0].content + '<|end|>' }}{% else %}{% set rest = messages %}{% endif %}
{%- if tools %}{% for tool in tools %}{{ '<|start|>developer<|message|>type ' + tool.function.name + '<|end|>' }}
{%- endfor %}{% endif %}
{%- for message in rest -%}{% if message.role == 'assistant' %}{% if 'tool_calls' in message %}
{%- set later = namespace(final=false) %}{% for other in rest[loop.index:] %}
{%- if other.role == 'assistant' and 'tool_calls' not in other %}{% set later.final = true %}{% endif %}{% endfor %}
{%- set call = message.tool_calls[0].function %}{% if message.content and message.thinking %}
{{- raise_exception('content or thinking, not both') }}{% elif message.thinking and not later.final %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- elif message.content and not later.final %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>' }}{% endif %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{ "<|call|>" }}
{%- elif loop.last and not add_generation_prompt %}{% if 'thinking' in message %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' + message.content | tojson + '<|end|>' }}
{%- else %}{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""
# No end: what ends an answer is the token that the next message begins with.
GLM = """[gMASK]<sop>
{%- set ns = namespace(last_user_index=-1) %}{% for m in messages %}{% if m.role == 'user' %}
{%- set ns.last_user_index = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content }}
{%- elif m.role == 'assistant' %}{{ '<|assistant|>' }}{% set reasoning_content = '' %}{% set content = m.content %}
{%- if m.reasoning_content is string %}{% set reasoning_content = m.reasoning_content %}
{%- elif '</think>' in content %}{% set reasoning_content = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1] %}{% endif %}
{%- if loop.index0 > ns.last_user_index and reasoning_content %}{{ '\n<think>' + reasoning_content.strip() + '</think>' }}
{%- else %}{{ '\n<think></think>' }}{% endif %}{% if content.strip() %}{{ '\n' + content.strip() }}{% endif %}
{%- for call in m.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name + '\n' }}
{%- for k, v in call.function.arguments.items() %}{{ '<arg_key>' ~ k ~ '</arg_key>\n<arg_value>' ~ v ~ '</arg_value>\n' }}
{%- endfor %}{{ '</tool_call>' }}{% endfor %}
{%- elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- elif m.role == 'system' %}{{ '<|system|>\n' + m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
# What generation begins with is a part of the answer's own first word.
DEEPSEEK2 = """{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ 'User: ' + m['content'] + '\n\n' }}
{%- elif m['role'] == 'assistant' %}{{ 'Assistant: ' + m['content'] + eos_token }}
{%- elif m['role'] == 'system' %}{{ m['content'] + '\n\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
# The answer to results of tools has no prompt of its own: it follows their end. The released one asks for content that is
# none, and fails with calls in transformers 5.24, which takes such keys away.
DEEPSEEK3_SERVED = """{% set ns = namespace(after_tool=false, called=false, gave=false, system='') %}
{%- for m in messages %}{% if m['role'] == 'system' %}{% set ns.system = ns.system + m['content'] %}{% endif %}{% endfor %}
{{- bos_token }}{{ ns.system }}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.after_tool = false %}
{{- '<user>' + m['content'] }}{% elif m['role'] == 'assistant' and (m['content'] is not defined or m['content'] is none) %}
{%- set ns.after_tool = false %}
{%- for call in m['tool_calls'] %}{% if not ns.called %}
{{- '<assistant><calls><call>' + call['function']['name'] + '\n' + call['function']['arguments'] + '</call>' }}
{%- set ns.called = true %}{% else %}
{{- '\n<call>' + call['function']['name'] + '\n' + call['function']['arguments'] + '</call>' }}{{ '</calls>' + eos_token }}
{%- endif %}{% endfor %}{% elif m['role'] == 'assistant' %}{% if ns.after_tool %}
{{- '</outputs>' + m['content'] + eos_token }}{% set ns.after_tool = false %}{% else %}
{{- '<assistant>' + m['content'] + eos_token }}{% endif %}{% elif m['role'] == 'tool' %}{% set ns.after_tool = true %}
{{- '\n' if ns.gave else '<outputs>' }}{{ '<output>' + m['content'] + '</output>' }}{% set ns.gave = true %}{% endif %}
{%- endfor %}{% if ns.after_tool %}{{ '</outputs>' }}{% endif %}
{%- if add_generation_prompt and not ns.after_tool %}{{ '<assistant>' }}{% endif %}"""
# Goes through numbers of messages, not through messages.
EXAONE = """{%- set skip_think = true if skip_think is not defined else skip_think %}
{%- for i in range(messages | length) %}{% set msg = messages[i] %}
{%- if i == 0 and msg.role == 'system' %}{{ '[|system|]\n' + msg.content + '[|endofturn|]\n' }}{% continue %}{% endif %}
{%- if msg.role == 'assistant' %}{{ '[|assistant|]\n' }}
{%- if not skip_think and loop.last and msg.reasoning_content %}
{{- '<think>\n' + msg.reasoning_content + '\n</think>\n\n' }}{% else %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{{- msg.content }}{% for call in msg.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + call.function.arguments | tojson + '</tool_call>' }}{% endfor %}
{{- '[|endofturn|]\n' }}
{%- else %}{{ '[|' + msg.role + '|]\n' + msg.content + '[|endofturn|]\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '[|assistant|]\n' }}
{%- if enable_thinking is defined and enable_thinking %}{{ '<think>\n' }}{% else %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
# Thoughts under a tag of its own, and a budget for them that the prompt of a thought of none closes.
SEED_OSS = """{%- set bos_token = '<seed:bos>' %}{% set eos_token = '<seed:eos>' %}
{%- if messages[0].role == 'system' %}{% set rest = messages[1:] %}{{ bos_token + 'system\n' + messages[0].content + eos_token }}
{%- else %}{% set rest = messages %}{% endif %}
{%- for item in tools or [] %}{{ bos_token + 'system\ndef ' + item.function.name + '()' + eos_token }}{% endfor %}
{%- if thinking_budget is defined and thinking_budget == 0 %}{{ bos_token + 'system\nAnswer at once.' + eos_token }}{% endif %}
{%- for message in rest %}{% if message.role == 'assistant' %}{{ bos_token + message.role }}
{%- if message.reasoning_content is defined and message.reasoning_content is string and message.reasoning_content | trim | length > 0 %}
{{- '\n<seed:think>' + message.reasoning_content | trim + '</seed:think>' }}{% endif %}
{%- if message.content | trim | length > 0 %}{{ '\n' + message.content | trim }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ '\n<seed:tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for name, value in call.function.arguments | items %}{{ '<parameter=' + name + '>' + value | string + '</parameter>\n' }}{% endfor %}
{{- '</function>\n</seed:tool_call>' }}{% endfor %}{{ eos_token }}
{%- else %}{{ bos_token + message.role + '\n' + message.content + eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ bos_token + 'assistant\n' }}
{%- if thinking_budget is defined and thinking_budget == 0 %}{{ '<seed:think><seed:cot_budget_reflect>' }}{% endif %}{% endif %}"""
# The prompt opens a thought; thoughts before the last question are left out.
MINIMAX = """{%- set ns = namespace(last_user_index=-1) %}
{%- if messages[0].role == 'system' %}{% set rest = messages[1:] %}{{ ']~!b[]~b]system\n' + messages[0].content + '[e~[\n' }}
{%- else %}{% set rest = messages %}{{ ']~!b[]~b]system\nYou help.[e~[\n' }}{% endif %}
{%- for m in rest %}{% if m.role == 'user' %}{% set ns.last_user_index = loop.index0 %}{% endif %}{% endfor %}
{%- for message in rest %}{% if message.role == 'assistant' %}{{ ']~b]ai\n' }}
{%- set reasoning_content = '' %}{% set content = message.content %}
{%- if message.reasoning_content is string %}{% set reasoning_content = message.reasoning_content %}
{%- elif '</think>' in content %}{% set reasoning_content = content.split('</think>')[0].strip('\n').split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].strip('\n') %}{% endif %}
{%- if reasoning_content and loop.index0 > ns.last_user_index %}{{ '<think>\n' + reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- content }}{% if message.tool_calls %}{{ '\n<minimax:tool_call>\n' }}{% for call in message.tool_calls %}
{{- '<invoke name="' + call.function.name + '">\n' + call.function.arguments | tojson + '</invoke>\n' }}{% endfor %}
{{- '</minimax:tool_call>' }}{% endif %}{{ '[e~[\n' }}
{%- elif message.role == 'tool' %}{{ ']~b]tool\n<response>' + message.content + '</response>[e~[\n' }}
{%- else %}{{ ']~b]user\n' + message.content + '[e~[\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ ']~b]ai\n<think>\n' }}{% endif %}"""
# Asks for the date; without thinking the prompt and each turn hold an empty thought.
SMOLLM3 = """{%- if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}
{%- set mode = '/think' if enable_thinking else '/no_think' %}{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{% if '/no_think' in messages[0].content %}{% set mode = '/no_think' %}{% endif %}
{%- set own = messages[0].content.replace('/no_think', '').rstrip() %}{% endif %}
{{- 'Today Date: ' + strftime_now('%d %B %Y') + '\nReasoning Mode: ' + mode + '\n\n' }}
{{- own if own else 'You help.' }}{{ '<|im_end|>\n' }}
{%- for message in messages %}{% set content = message.content if message.content is string else '' %}
{%- if message.role == 'user' or message.role == 'tool' %}{{ '<|im_start|>user\n' + content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}{% if mode == '/think' %}{{ '<|im_start|>assistant\n' + content.lstrip('\n') + '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n' + content.lstrip('\n') + '<|im_end|>\n' }}{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if mode != '/think' %}{{ '<think>\n\n</think>\n' }}{% endif %}{% endif %}"""
# Its namespace holds the system prompt that tools are added to.
GRANITE = """{%- set ns = namespace(system='You are kind.') %}
{%- if messages[0].role == 'system' %}{% set ns.system = messages[0].content %}{% endif %}
{%- for tool in tools or [] %}{% set ns.system = ns.system + '\n' + (tool | tojson) %}{% endfor %}
{{- '<|start_of_role|>system<|end_of_role|>' + ns.system + '<|end_of_text|>\n' }}
{%- for message in messages %}{% if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\n' }}
{%- elif message.role == 'assistant' %}{{ '<|start_of_role|>assistant<|end_of_role|>' + message.content }}
{%- for call in message.tool_calls or [] %}{% if not loop.first or message.content %}{{ '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}
{{- '<|end_of_text|>\n' }}
{%- elif message.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|start_of_role|>user<|end_of_role|>' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|end_of_text|>\n' }}{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"""
# The prompt is written in the loop, and no line ends behind the last answer.
OLMO2 = """{{- bos_token }}{% for message in messages %}{% if message.role != 'assistant' %}
{{- '<|' + message.role + '|>\n' + message.content + '\n' }}
{%- elif loop.last %}{{ '<|assistant|>\n' + message.content + eos_token }}
{%- else %}{{ '<|assistant|>\n' + message.content + eos_token + '\n' }}{% endif %}
{%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"""
# The last answer ends with the end of the text, earlier ones with the end of a turn.
OLMO3 = """{%- if messages | selectattr('role', 'equalto', 'system') | list | length == 0 %}
{{- '<|im_start|>system\nYou call functions. <functions></functions><|im_end|>\n' }}{% endif %}
{%- for message in messages %}{% if message.role == 'system' %}{{ '<|im_start|>system\n' + message.content }}
{%- if tools %}{{ '<functions>' + tools | tojson + '</functions>' }}{% endif %}{{ '<|im_end|>\n' }}
{%- elif message.role == 'user' %}{{ '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\n' + message.content }}
{%- if message.tool_calls %}{{ '<function_calls>' }}{% for call in message.tool_calls %}{{ call.function.name + '()' }}{% endfor %}
{{- '</function_calls>' }}{% endif %}{{ '<|endoftext|>' if loop.last else '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>environment\n' + message.content + '<|im_end|>\n' }}{% endif %}
{%- if loop.last and add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}{% endfor %}"""
# Roles are words, and what the assistant says ends with a token that others do not.
ERNIE = """{%- if not add_generation_prompt is defined %}{% set add_generation_prompt = true %}{% endif %}
{%- if not sep_token is defined %}{% set sep_token = '<|end_of_sentence|>' %}{% endif %}{{ '<|begin_of_sentence|>' }}
{%- for message in messages %}{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n' }}
{%- elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + sep_token }}
{%- elif message['role'] == 'system' %}{{ message['content'] + '\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"""
# No prompt; roles must alternate; thoughts are parts of the content.
MINISTRAL3 = """{{- bos_token }}{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}
{{- '[SYSTEM_PROMPT]' + messages[0]['content'] + '[/SYSTEM_PROMPT]' }}{% else %}{% set rest = messages %}
{{- '[SYSTEM_PROMPT]Think first.[/SYSTEM_PROMPT]' }}{% endif %}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}{% set ns = namespace(index=0) %}
{%- for message in rest %}{% if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.index = ns.index + 1 %}{% endif %}{% endfor %}
{%- for message in rest %}{% if message['role'] == 'user' %}{{ '[INST]' + message['content'] + '[/INST]' }}
{%- elif message['role'] == 'assistant' %}{% if message['content'] is string %}{{ message['content'] }}
{%- else %}{% for block in message['content'] %}{% if block['type'] == 'text' %}{{ block['text'] }}
{%- elif block['type'] == 'thinking' %}{{ '[THINK]' + block['thinking'] + '[/THINK]' }}{% endif %}{% endfor %}{% endif %}
{%- for call in message['tool_calls'] or [] %}
{{- '[TOOL_CALLS]' + call['function']['name'] + '[ARGS]' + call['function']['arguments'] | tojson }}{% endfor %}{{ eos_token }}
{%- elif message['role'] == 'tool' %}{{ '[TOOL_RESULTS]' + message['content'] | string + '[/TOOL_RESULTS]' }}{% endif %}{% endfor %}"""
# As Ministral 3, and the prompt says behind the tools how much to think; nothing unless a variable asks.
MISTRAL4 = MINISTRAL3.replace(
    "{% set ns = namespace(index=0) %}",
    """{% set effort = reasoning_effort if reasoning_effort is defined and reasoning_effort is not none else 'none' %}
{%- if effort not in ['none', 'high'] %}{{ raise_exception('effort is none or high') }}{% endif %}
{{- '[MODEL_SETTINGS]{"reasoning_effort": "' + effort + '"}[/MODEL_SETTINGS]' }}{% set ns = namespace(index=0) %}""",
).replace("Think first.", "You are kind.")
# As GLM, without thoughts.
GLM4 = """[gMASK]<sop>{% for tool in tools or [] %}{{ '<|system|>\n' + tool.function.name }}{% endfor %}
{%- for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content }}
{%- elif m.role == 'tool' %}{{ '<|observation|>\n' + m.content }}
{%- elif m.role == 'system' %}{{ '<|system|>\n' + m.content }}
{%- else %}{{ '<|assistant|>' }}{% for call in m.tool_calls or [] %}{{ call.function.name + '\n' + call.function.arguments | tojson }}{% endfor %}
{{- '\n' + m.content if m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
# Joins arguments to text, reads calls where the content is null, and ends an answer only behind the
# second call.
DEEPSEEK3 = """{%- set ns = namespace(is_first=false, is_tool=false) %}{{ bos_token }}{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '<User>' + message['content'] }}{% endif %}
{%- if message['role'] == 'assistant' and message['content'] is none %}{% set ns.is_tool = false %}
{%- for tool in message['tool_calls'] %}{% if not ns.is_first %}
{{- '<Assistant><calls><call>' + tool['function']['name'] + '\n' + tool['function']['arguments'] + '</call>' }}
{%- set ns.is_first = true %}{% else %}
{{- '\n<call>' + tool['function']['name'] + '\n' + tool['function']['arguments'] + '</call>' }}{{ '</calls><eos>' }}
{%- endif %}{% endfor %}{% endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}{% if ns.is_tool %}
{{- '</outputs>' + message['content'] + '<eos>' }}{% set ns.is_tool = false %}
{%- else %}{{ '<Assistant>' + message['content'] + '<eos>' }}{% endif %}{% endif %}
{%- if message['role'] == 'tool' %}{% set ns.is_tool = true %}{{ '<output>' + message['content'] }}{% endif %}
{%- endfor %}{% if ns.is_tool %}{{ '</outputs>' }}{% endif %}
{%- if add_generation_prompt and not ns.is_tool %}{{ '<Assistant>' }}{% endif %}"""
# Of a processor: contents are lists of parts.
IDEFICS3 = """{{ bos_token }}{% for message in messages %}{{ message['role'].capitalize() }}
{%- if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}
{%- for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}
{%- elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
# Thoughts are a field, served behind the last question alone; an answer goes on behind its call.
GEMMA4 = """{{ bos_token }}{% set ns = namespace(last=-1, before='') %}{% set rest = messages %}
{%- if tools or messages[0]['role'] == 'system' %}{{ '<|turn>system\n' }}{% if messages[0]['role'] == 'system' %}
{{- messages[0]['content'] | trim }}{% set rest = messages[1:] %}{% endif %}
{%- for tool in tools or [] %}{{ '<|tool>' + tool.function.name + '<tool|>' }}{% endfor %}{{ '<turn|>\n' }}{% endif %}
{%- for m in rest %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in rest %}{% if m.role == 'tool' %}{{ '<|tool_response>' + m.content + '<tool_response|>' }}{% else %}
{%- if not (m.role == 'assistant' and ns.before == 'tool') %}
{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}{% endif %}
{%- if m.reasoning_content and loop.index0 > ns.last %}{{ '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}{% endif %}
{%- for call in m.tool_calls or [] %}{{ '<|tool_call>call:' + call.function.name + call.function.arguments | tojson + '<tool_call|>' }}{% endfor %}
{{- m.content | trim }}{{ '<turn|>\n' if not m.tool_calls }}{% endif %}{% set ns.before = m.role %}{% endfor %}
{%- if add_generation_prompt and ns.before != 'tool' %}{{ '<|turn>model\n' }}{% endif %}"""
