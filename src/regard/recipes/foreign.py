"""Names of settings in other toolkits, so that the error for an unknown key can suggest ours."""

from __future__ import annotations

# Our setting (or several, of which a family has one or two), and its names in fairseq, OpenNMT, Marian, Joey NMT,
# Hugging Face, PyTorch Lightning and nanoGPT, with underscores for dashes.
_NAMES = {
    "data.source": "src train_src src_train path_src source_file",
    "data.target": "tgt trg train_tgt tgt_train path_tgt target_file labels",
    "data.valid": "dev val validation eval valid_src valid_tgt dev_src validpref dev_data valid_sets validation_file",
    "data.test": "testpref test_src test_tgt test_data test_file",
    "data.max_length": "max_seq_length max_sentence_length max_sent_length src_seq_length tgt_seq_length",
    "data.lowercase": "lower lower_case do_lower_case uncased",
    "text.vocabulary": "vocab vocab_size n_vocab num_merges bpe_merges bpe_size bpe_codes bpe_tokens src_vocab_size "
    "tgt_vocab_size voc_limit vocabulary_size",
    "text.unit": "bpe tokenizer tokenizer_type level token_type subword subwords",
    "text.shared": "share_vocab shared_vocab joined_dictionary joint_vocab joint_bpe",
    "model.family": "arch architecture model_type encoder_type decoder_type",
    "model.width": "hidden_size d_model n_embd embed_dim embedding_dim emb_dim model_dim hidden_dim dim rnn_size "
    "word_vec_size encoder_embed_dim decoder_embed_dim hidden",
    "model.ffn_width": "ffn_dim d_ff ff_size transformer_ff intermediate_size encoder_ffn_dim decoder_ffn_dim n_inner "
    "dim_feedforward encoder_ffn_embed_dim decoder_ffn_embed_dim feed_forward ffn_size",
    "model.heads": "num_heads n_heads n_head nhead attention_heads num_attention_heads encoder_attention_heads "
    "decoder_attention_heads transformer_heads",
    "model.layers model.encoder_layers model.decoder_layers": "num_layers n_layers n_layer num_hidden_layers depth",
    "model.layers model.encoder_layers": "enc_layers enc_depth num_encoder_layers n_encoder_layers",
    "model.layers model.decoder_layers": "dec_layers dec_depth num_decoder_layers n_decoder_layers",
    "model.dropout": "dropout_rate dropout_prob p_dropout pdrop drop_rate hidden_dropout hidden_dropout_prob "
    "resid_pdrop embd_pdrop attn_pdrop attention_dropout attention_probs_dropout_prob transformer_dropout",
    "model.activation": "activation_fn activation_function hidden_act",
    "model.max_positions": "max_position_embeddings max_source_positions max_target_positions block_size n_ctx "
    "n_positions context context_length max_seq_len seq_len sequence_length",
    "model.tie_embeddings": "tie_embeddings tied_embeddings tie_word_embeddings share_decoder_embeddings weight_tying "
    "share_decoder_input_output_embed share_all_embeddings tied_embeddings_all",
    "model.norm_first": "pre_norm prenorm normalize_before encoder_normalize_before decoder_normalize_before",
    "training.learning_rate": "lr max_lr peak_lr base_lr rate init_lr",
    "training.schedule": "lr_scheduler lr_scheduler_type scheduler scheduling decay_method lr_decay lr_schedule",
    "training.final_rate": "min_lr end_lr end_learning_rate learning_rate_min lr_end stop_min_lr",
    "training.warmup": "warmup_steps warmup_updates num_warmup_steps lr_warmup learning_rate_warmup warmup_iters "
    "warmup_ratio",
    "training.steps": "max_steps max_update max_updates updates train_steps num_steps num_train_steps total_steps "
    "iterations iters max_iters max_iterations after_batches total_num_update epochs epoch num_epochs n_epochs "
    "max_epochs max_epoch num_train_epochs after_epochs",
    "training.batch_tokens": "batch_size train_batch_size per_device_train_batch_size bsz mini_batch minibatch "
    "mini_batch_words max_tokens batch max_sentences tokens_per_batch",
    "training.accumulate": "gradient_accumulation gradient_accumulation_steps accum_count accum grad_accum update_freq "
    "accumulate_grad_batches batch_multiplier optimizer_delay",
    "training.optimizer": "optim",
    "training.betas": "adam_betas adam_beta1 adam_beta2 beta1 beta2 optimizer_params",
    "training.weight_decay": "wd l2 decay",
    "training.max_grad_norm": "clip clip_norm grad_clip gradient_clip gradient_clip_val clip_grad_norm grad_norm",
    "training.label_smoothing": "smoothing label_smoothing_factor criterion_smoothing",
    "training.precision": "fp16 bf16 amp mixed_precision dtype half",
    "training.validate_every": "eval_steps eval_every eval_interval valid_steps valid_freq validation_freq "
    "validation_interval val_check_interval validate_interval validate_interval_updates",
    "training.save_every": "save_steps save_freq save_interval save_interval_updates save_checkpoint_steps "
    "checkpoint_interval",
    "training.patience": "early_stopping early_stopping_patience",
    "training.average": "average_checkpoints avg_checkpoints average_last_checkpoints num_epoch_checkpoints",
    "training.ema": "ema_decay exponential_smoothing",
    "training.checkpoint_activations": "gradient_checkpointing activation_checkpointing",
    "training.seed": "random_seed manual_seed",
    "decoding.beam": "beam_size num_beams beams n_beams",
    "decoding.length_penalty": "lenpen alpha length_norm normalize beam_alpha",
    "decoding.no_repeat_ngram": "no_repeat_ngram_size block_ngram_repeat",
    "decoding.top_k": "topk sampling_topk random_sampling_topk",
    "decoding.top_p": "topp nucleus sampling_topp random_sampling_topp",
    "decoding.temperature": "temp softmax_temperature random_sampling_temp",
    "--out RUN": "out output output_dir save_dir save_model model_dir",
    "--device": "device gpu gpus use_cuda cuda",
}
SETTINGS = {
    name: ours.split(" ") if "." in ours else [ours] for ours, names in _NAMES.items() for name in names.split()
}
UNITS = {  # of settings whose number has another meaning in other toolkits
    "training.steps": "it counts updates, not epochs",
    "training.batch_tokens": "it counts target tokens, not sentences",
    "training.warmup": "it counts updates",
}
