"""How the tiny model that kvkeep ships is made: corpus, dialogues, tokenizer, training, release."""
