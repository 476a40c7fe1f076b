"""Other APIs beside OpenAI's chats. Each door turns its body into a chat, and the parts of the answer into its replies.

    blocks.py     what the doors have in common: parts of contents, events with names, thoughts that clients carry
    messages.py   Anthropic's POST /v1/messages
    responses.py  OpenAI's POST /v1/responses
    ollama.py     POST /api/chat and /api/generate of Ollama, and what its clients read
    routes.py     the URLs

The text is that of the chat with the same messages, tools and settings.
"""
