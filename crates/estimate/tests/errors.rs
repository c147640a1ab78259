//! Tests models that do not fit together, and hostile files.

use gpumem_estimate::{
    Attention, Experts, Function, HeadNorm, Input, Layer, Linear, Loss, Model, Optimizer, RunExperts, Shape, Step,
    models, numbered,
};

fn model(layers: impl IntoIterator<Item = Layer>, input: Input) -> Model {
    Model { name: "test".to_owned(), input, layers: numbered(layers), loss: Loss::default() }
}

fn image() -> Input {
    Input::Numbers(Shape::from([3, 8, 8]))
}

fn message(layers: impl IntoIterator<Item = Layer>, input: Input) -> String {
    Step::inference(2).estimate(&model(layers, input)).unwrap_err().to_string()
}

#[test]
fn a_mismatch_names_the_layer_and_both_shapes() {
    let layers = [Layer::sequence([Layer::conv2d(3, 4, 3, 1, 1), Layer::conv2d(8, 4, 3, 1, 1)])];
    let error = Step::inference(2).estimate(&model(layers, image())).unwrap_err();
    assert_eq!(error.layer(), "0.1");
    let expected = "layer `0.1`: expects an input of shape (…, 8, …, …) and gets (2, 4, 8, 8)";
    assert_eq!(error.to_string(), expected);
    let expected = "layer `1`: expects an input of shape (…, 5) and gets (2, 192)";
    assert_eq!(message([Layer::Flatten, Layer::linear(5, 5)], image()), expected);
    let expected = "layer `0`: expects an input of shape (2, 5, 8, 8) and gets (2, 3, 8, 8)";
    assert_eq!(message([Layer::BatchNorm { channels: 5 }], image()), expected);
    let residual =
        Layer::Residual { layers: numbered([Layer::conv2d(3, 4, 3, 1, 1)]), shortcut: vec![], in_place: false };
    let expected = "layer `0`: a sum does not work with the shapes (2, 3, 8, 8) and (2, 4, 8, 8)";
    assert_eq!(message([residual], image()), expected);
    let expected = "layer `0`: expects an input of shape a window of 9 with stride 1 and padding 0 or more";
    assert!(message([Layer::conv2d(3, 4, 9, 1, 0)], image()).starts_with(expected));
}

#[test]
fn sizes_that_overflow_are_errors() {
    let large = "the sizes are too large: the sum does not fit into 62 bits";
    assert_eq!(message([Layer::linear(1 << 40, 1 << 40)], image()), format!("layer `0`: {large}"));
    assert_eq!(message([Layer::conv2d(u64::MAX, u64::MAX, 3, 1, 1)], image()), format!("layer `0`: {large}"));
    // Each of the two layers has 2^61 bytes.
    let halves = [Layer::linear(1 << 30, 1 << 29), Layer::linear(1 << 29, 1 << 30)];
    assert_eq!(message(halves, image()), format!("layer `1`: {large}"));
    let huge = Input::Numbers(Shape::from([u64::MAX, u64::MAX]));
    assert_eq!(message([Layer::Flatten], huge.clone()), large);
    assert!(Step::inference(1).estimate(&model([Layer::Flatten], huge)).is_err());
    let step = Step::training(u64::MAX, Optimizer::Adam);
    assert!(step.estimate(&models::vgg19()).is_err());
}

#[test]
fn sizes_that_make_no_sense_are_errors() {
    let zero_stride = message([Layer::conv2d(3, 4, 3, 0, 1)], image());
    assert!(zero_stride.starts_with("layer `0`: expects"), "{zero_stride}");
    assert!(message([Layer::conv2d(3, 4, 0, 1, 1)], image()).starts_with("layer `0`: expects"));
    let tied = Layer::Linear(Linear { inputs: 192, outputs: 2, no_bias: true, tied_to: Some("x".to_owned()) });
    assert_eq!(message([tied], image()), "layer `0`: no layer before it has the path `x` and a weight to share");
    for (heads, key_value_heads, expected) in [
        (0, 0, "layer `0`: 0 heads cannot share 0 heads of keys"),
        (1, 2, "layer `0`: 1 head cannot share 2 heads of keys"),
    ] {
        let attention = Attention { size: 8, heads, key_value_heads, ..Default::default() };
        assert_eq!(message([Layer::Attention(attention)], Input::Numbers(Shape::from([4, 8]))), expected);
    }
    let embedding = Layer::Embedding { rows: 10, size: 4 };
    assert_eq!(message([embedding], image()), "layer `0`: an embedding needs integers and gets f32");
}

#[test]
fn hostile_json_is_an_error() {
    let unknown = Model::from_json(r#"{"name": "", "input": {"tokens": 1}, "layers": [{"name": "a", "type": "b"}]}"#);
    let expected = "this is not a model: layer `a` (`layers[0]`): unknown variant `b`, expected one of `sequential`, ";
    let read = unknown.unwrap_err().to_string();
    assert!(read.starts_with(expected), "{read}");
    let open = r#"{"name":"a","type":"sequential","layers":["#.repeat(100_000);
    let nested = format!(r#"{{"name": "", "input": {{"tokens": 1}}, "layers": [{open}"#);
    assert!(Model::from_json(&nested).is_err());
    let negative = r#"{"name": "", "input": {"tokens": -1}, "layers": []}"#;
    assert!(Model::from_json(negative).is_err());
    // The nesting is below the limit of the parser, and above that of a model.
    let mut layer = Layer::Flatten;
    for _ in 0..100 {
        layer = Layer::sequence([layer]);
    }
    assert!(message([layer], image()).ends_with("layers are nested deeper than 64"));
}

#[test]
fn models_are_read_from_toml() {
    let text = r#"
        name = "small"
        loss = "next_token"
        [input]
        tokens = 16
        [[layers]]
        name = "embedding"
        type = "embedding"
        rows = 100
        size = 8
        [[layers]]
        name = "blocks"
        type = "sequential"
        [[layers.layers]]
        name = "norm"
        type = "rms_norm"
        size = 8
        [[layers.layers]]
        name = "head"
        type = "linear"
        inputs = 8
        outputs = 100
        no_bias = true
        tied_to = "embedding"
    "#;
    let model = Model::from_toml(text).unwrap();
    assert_eq!(model.loss, Loss::NextToken);
    assert_eq!(Step::training(2, Optimizer::Sgd).estimate(&model).unwrap().parameters, 800 + 8);
    let error = |text: &str| Model::from_toml(text).unwrap_err().to_string();
    let place = "this is not a model: layer `blocks.norm` (`layers[1].layers[0]`): ";
    let wrong_type = format!("{place}unknown variant `b_norm`, expected one of `sequential`, ");
    let message = error(&text.replace("rms_norm", "b_norm"));
    assert!(message.starts_with(&wrong_type), "{message}");
    assert_eq!(error(&text.replace("[input]", "heads = 1\n[input]")), "this is not a model: there is no field `heads`");
    assert!(error("name = 1").starts_with("this is not a model: "));
}

#[test]
fn a_wrong_layer_is_named() {
    let error = |layer: &str| {
        let inner = format!(
            r#"{{"name": "mlp", "type": "residual", "layers": [{{"name": "a", "type": "flatten"}}, {layer}]}}"#
        );
        let text = format!(r#"{{"name": "", "input": {{"tokens": 1}}, "layers": [{inner}]}}"#);
        let message = Model::from_json(&text).unwrap_err().to_string();
        message.strip_prefix("this is not a model: ").expect("what it is about").to_owned()
    };
    let at = |what: &str| format!("layer `mlp.b` (`layers[0].layers[1]`): {what}");
    let layer = |fields: &str| error(&format!(r#"{{"name": "b", {fields}}}"#));
    assert_eq!(layer(r#""type": "linear", "inputs": 4"#), at("missing field `outputs`"));
    assert_eq!(layer(r#""inputs": 4"#), at("missing field `type`"));
    let negative = layer(r#""type": "linear", "outputs": 4, "inputs": -1"#);
    assert_eq!(negative, at("invalid value: integer `-1`, expected u64"));
    let activation = layer(r#""type": "activation", "function": "tan""#);
    assert!(activation.starts_with(&at("unknown variant `tan`, expected one of `relu`")), "{activation}");
    let typo = layer(r#""type": "linear", "inputs": 4, "outputs": 4, "no_bais": true"#);
    assert_eq!(typo, at("there is no field `no_bais`"));
    let unnamed = error(r#"{"type": "flatten"}"#);
    assert_eq!(unnamed, "layer `mlp` (`layers[0].layers[1]`): missing field `name`");
    let model = Model::from_json(r#"{"layers": [], "input": {"tokens": 1}}"#).unwrap_err().to_string();
    assert!(model.starts_with("this is not a model: missing field `name`"), "{model}");
}

/// Each layer has the names of all layers around it.
#[test]
fn long_paths_are_errors() {
    let inside = Layer::Sequential { layers: vec![Layer::Flatten.named("b".repeat(300))] };
    let long = vec![inside.named("a".repeat(300))];
    let error = Step::inference(1).estimate(&Model { layers: long, ..model([], image()) }).unwrap_err();
    assert_eq!(error.to_string(), "the names of layers make a path of more than 500 bytes");
}

#[test]
fn sizes_inside_of_layers_fit() {
    let tokens = || Input::Numbers(Shape::from([5, 8]));
    let experts = |size, per_token| {
        let (function, run) = (Function::Silu, RunExperts::Grouped);
        Layer::Experts(Experts { size, hidden: 4, experts: 3, per_token, function, shared: 0, run })
    };
    assert_eq!(message([experts(9, 2)], tokens()), "layer `0`: expects an input of shape (…, …, 9) and gets (2, 5, 8)");
    for per_token in [0, 4] {
        let expected = format!("layer `0`: a token cannot pass through {per_token} of 3 experts");
        assert_eq!(message([experts(8, per_token)], tokens()), expected);
    }
    let cross = || {
        let reads = Some("text".to_owned());
        Layer::Attention(Attention { size: 8, heads: 2, reads, ..Attention::default() })
    };
    assert_eq!(message([cross()], tokens()), "layer `0`: no layer before it leaves `text`");
    let text = |size| {
        let (slot, sizes) = ("text".to_owned(), vec![3, size]);
        Layer::Provide { slot, sizes, integers: false, is_next: false, layers: vec![] }
    };
    let expected = "layer `1`: expects an input of shape (2, …, 8) and gets (2, 3, 7)";
    assert_eq!(message([text(7), cross()], tokens()), expected);
    assert!(Step::inference(2).estimate(&model([text(8), cross()], tokens())).is_ok());
    let rotated = Layer::Attention(Attention { size: 8, heads: 2, rotates: true, rotated: 5, ..Attention::default() });
    assert_eq!(message([rotated], tokens()), "layer `0`: heads of 4 cannot rotate 5 elements");
    let positions = Layer::Positions { rows: 4, size: 8, is_fixed: false };
    let expected = "layer `0`: expects an input of shape (…, 4 or less, 8) and gets (2, 5, 8)";
    assert_eq!(message([positions], tokens()), expected);
    let norm = HeadNorm::Rms;
    let normed = Layer::Attention(Attention { size: 8, heads: 2, head_size: 3, norm, ..Attention::default() });
    assert!(Step::inference(2).estimate(&model([normed], tokens())).is_ok());
}

/// The depth of hostile values.
const DEEP: usize = 100_000;

#[test]
fn hostile_toml_is_an_error() {
    let error = |text: &str| {
        let message = Model::from_toml(text).unwrap_err().to_string();
        assert!(message.starts_with("this is not a model: "), "{message}");
    };
    error(&format!("layers = {}", "[".repeat(DEEP)));
    error(&format!("layers = {}{}", "[".repeat(DEEP), "]".repeat(DEEP)));
    error(&format!("layers = {}{}", "{a=".repeat(DEEP), "}".repeat(DEEP)));
    error(&format!("a{} = 1", ".a".repeat(DEEP)));
    error(&format!("[a{}]", ".a".repeat(DEEP)));
    error(&format!("[[a{}]]", ".a".repeat(DEEP)));
    error(&format!("name = \"a\"\nlayers = []\ninput = {{ tokens{} = 1 }}", ".a".repeat(DEEP)));
    error(&format!("name = \"a\"\nlayers = []\ninput = {{ tokens = 1{} }}", "0".repeat(DEEP)));
    error("name = \"\"\nlayers = []\ninput = { tokens = -1 }");
}

#[test]
fn a_decoder_needs_an_encoder_and_target_tokens() {
    let attention = Attention { size: 8, heads: 2, relative: true, ..Attention::default() };
    let tokens = || Input::Numbers(Shape::from([4, 8]));
    let cross = Layer::Attention(Attention { reads: Some("encoder".to_owned()), ..attention.clone() });
    assert_eq!(message([cross], tokens()), "layer `0`: no layer before it leaves `encoder`");
    let own = Layer::Attention(attention);
    assert_eq!(message([own], tokens()), "layer `0`: no layer before it has a table of position biases");
    let pair = Layer::EncoderDecoder { encoder: vec![], decoder: vec![] };
    assert_eq!(message([pair.clone()], tokens()), "layer `0`: a decoder needs target tokens");
    let both = model([pair], Input::Pair { source: 4, target: 3 });
    assert!(Step::inference(2).estimate(&both).is_ok());
    let tied = Layer::TiedEmbedding { tied_to: "x".to_owned() };
    assert_eq!(message([tied], tokens()), "layer `0`: no layer before it has the path `x` and a weight to share");
}
