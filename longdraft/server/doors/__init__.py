"""Other APIs beside OpenAI's chats. Each door turns its body into a chat, and the parts of the answer into its replies.

    blocks.py     what the doors have in common: parts of contents, events with names, thoughts that clients carry
    messages.py   Anthropic's POST /v1/messages
    responses.py  OpenAI's POST /v1/responses
    ollama.py     POST /api/chat and /api/generate of Ollama, and what its clients read
    llama_cpp.py  POST /completion of llama.cpp, and what its clients read
    kobold.py     POST /api/v1/generate of KoboldCpp
    routes.py     the URLs of APIs with chats
    text_routes.py  the URLs of APIs that continue a prompt, and what this server does not do

The text is that of the chat with the same messages, tools and settings, or of the completion with the same prompt.
"""
