"""Chat templates by the name of their format."""

from __future__ import annotations

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
        "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
        "{% elif message['role'] == 'assistant' %} {{ message['content'] }}{{ eos_token }}"
        "{% else %}{{ message['content'] }}\n\n{% endif %}{% endfor %}"
    ),
    "alpaca": (
        "{% for message in messages %}"
        "{% if message['role'] == 'system' %}{{ message['content'] }}\n\n"
        "{% elif message['role'] == 'user' %}### Instruction:\n{{ message['content'] }}\n\n"
        "{% else %}### Response:\n{{ message['content'] }}{{ eos_token }}\n\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}### Response:\n{% endif %}"
    ),
    "exaone": (
        "{% for message in messages %}[|{{ message['role'] }}|]"
        "{% if message['role'] == 'user' %}{{ message['content'] }}\n{% else %}{{ message['content'] }}[|endofturn|]\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}[|assistant|]{% endif %}"
    ),
}
