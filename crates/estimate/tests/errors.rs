//! Tests models that do not fit together, and hostile files.

use gpumem_estimate::{
    Attention, Experts, Function, HeadNorm, Input, Layer, Linear, Loss, Model, Optimizer, RunExperts, Shape, Step,
    models, numbered,
};

fn model(layers: impl IntoIterator<Item = Layer>, input: Input) -> Model {
    Model { name: "test".to_owned(), input, layers: numbered(layers), loss: Loss::default() }
}

fn numbers<const N: usize>(shape: [u64; N]) -> Input {
    Input::Numbers(Shape::from(shape))
}

fn image() -> Input {
    numbers([3, 8, 8])
}

fn message(layers: impl IntoIterator<Item = Layer>, input: Input) -> String {
    Step::inference(2).estimate(&model(layers, input)).unwrap_err().to_string()
}

/// Compares a message with the expected one, which is only its start if it ends with `*`.
fn fits(found: &str, expected: &str) -> bool {
    expected.strip_suffix('*').map_or(found == expected, |start| found.starts_with(start))
}

/// Checks messages of models that read an image and have one layer.
#[track_caller]
fn check<const N: usize>(cases: [(Layer, &str); N]) {
    for (layer, expected) in cases {
        let found = message([layer], image());
        assert!(fits(&found, &format!("layer `0`: {expected}")), "{found}");
    }
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
    let layers = numbered([Layer::conv2d(3, 4, 3, 1, 1)]);
    let window = "expects an input of shape a window of 9 with stride 1 and padding 0 or more*";
    check([
        (Layer::BatchNorm { channels: 5 }, "expects an input of shape (2, 5, 8, 8) and gets (2, 3, 8, 8)"),
        (
            Layer::Residual { layers, shortcut: vec![], in_place: false },
            "a sum does not work with the shapes (2, 3, 8, 8) and (2, 4, 8, 8)",
        ),
        (Layer::conv2d(3, 4, 9, 1, 0), window),
    ]);
}

#[test]
fn sizes_that_overflow_are_errors() {
    let large = "the sizes are too large: the sum does not fit into 62 bits";
    check([(Layer::linear(1 << 40, 1 << 40), large), (Layer::conv2d(u64::MAX, u64::MAX, 3, 1, 1), large)]);
    // Each of the two layers has 2^61 bytes.
    let halves = [Layer::linear(1 << 30, 1 << 29), Layer::linear(1 << 29, 1 << 30)];
    assert_eq!(message(halves, image()), format!("layer `1`: {large}"));
    let huge = || numbers([u64::MAX, u64::MAX]);
    assert_eq!(message([Layer::Flatten], huge()), large);
    assert!(Step::inference(1).estimate(&model([Layer::Flatten], huge())).is_err());
    assert!(Step::training(u64::MAX, Optimizer::Adam).estimate(&models::vgg19()).is_err());
}

#[test]
fn sizes_that_make_no_sense_are_errors() {
    check([
        (Layer::conv2d(3, 4, 3, 0, 1), "expects*"),
        (Layer::conv2d(3, 4, 0, 1, 1), "expects*"),
        (
            Layer::Linear(Linear { inputs: 192, outputs: 2, no_bias: true, tied_to: Some("x".to_owned()) }),
            "no layer before it has the path `x` and a weight to share",
        ),
        (Layer::TiedEmbedding { tied_to: "x".to_owned() }, "no layer before it has the path `x` and a weight to share"),
        (Layer::Attention(Attention { size: 8, ..Attention::default() }), "0 heads cannot share 0 heads of keys"),
        (
            Layer::Attention(Attention { size: 8, heads: 1, key_value_heads: 2, ..Attention::default() }),
            "1 head cannot share 2 heads of keys",
        ),
        (Layer::Embedding { rows: 10, size: 4 }, "an embedding needs integers and gets f32"),
    ]);
    // The nesting is below the limit of the parser, and above that of a model.
    let nested = (0..100).fold(Layer::Flatten, |layer, _| Layer::sequence([layer]));
    assert!(message([nested], image()).ends_with("layers are nested deeper than 64"));
    // Each layer has the names of all layers around it.
    let inside = Layer::Sequential { layers: vec![Layer::Flatten.named("b".repeat(300))] };
    let long = Model { layers: vec![inside.named("a".repeat(300))], ..model([], image()) };
    let error = Step::inference(1).estimate(&long).unwrap_err().to_string();
    assert_eq!(error, "the names of layers make a path of more than 500 bytes");
}

#[test]
fn models_are_read_from_toml() {
    let text = r#"
        name = "small"
        loss = "next_token"
        input = { tokens = 16 }
        [[layers]]
        name = "embedding"
        type = "embedding"
        rows = 100
        size = 8
        [[layers]]
        name = "blocks"
        type = "sequential"
        layers = [
            { name = "norm", type = "rms_norm", size = 8 },
            { name = "head", type = "linear", inputs = 8, outputs = 100, no_bias = true, tied_to = "embedding" },
        ]
    "#;
    let model = Model::from_toml(text).unwrap();
    assert_eq!(model.loss, Loss::NextToken);
    assert_eq!(Step::training(2, Optimizer::Sgd).estimate(&model).unwrap().parameters, 800 + 8);
    let error = |text: &str| Model::from_toml(text).unwrap_err().to_string();
    let place = "this is not a model: layer `blocks.norm` (`layers[1].layers[0]`): ";
    let message = error(&text.replace("rms_norm", "b_norm"));
    assert!(
        message.starts_with(&format!("{place}unknown variant `b_norm`, expected one of `sequential`, ")),
        "{message}"
    );
    assert_eq!(error(&text.replace("input =", "heads = 1\ninput =")), "this is not a model: there is no field `heads`");
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
    for (fields, what) in [
        (r#""type": "linear", "inputs": 4"#, "missing field `outputs`"),
        (r#""inputs": 4"#, "missing field `type`"),
        (r#""type": "linear", "outputs": 4, "inputs": -1"#, "invalid value: integer `-1`, expected u64"),
        (r#""type": "activation", "function": "tan""#, "unknown variant `tan`, expected one of `relu`*"),
        (r#""type": "linear", "inputs": 4, "outputs": 4, "no_bais": true"#, "there is no field `no_bais`"),
        (r#""type": "flatten", "layers": [{"name": "c", "type": "flatten"}]"#, "there is no field `layers`"),
    ] {
        let found = error(&format!(r#"{{"name": "b", {fields}}}"#));
        assert!(fits(&found, &format!("layer `mlp.b` (`layers[0].layers[1]`): {what}")), "{found}");
    }
    let unnamed = error(r#"{"type": "flatten"}"#);
    assert_eq!(unnamed, "layer `mlp` (`layers[0].layers[1]`): missing field `name`");
    let model = Model::from_json(r#"{"layers": [], "input": {"tokens": 1}}"#).unwrap_err().to_string();
    assert!(model.starts_with("this is not a model: missing field `name`"), "{model}");
}

#[test]
fn sizes_inside_of_layers_fit() {
    let tokens = || numbers([5, 8]);
    let experts = |size, per_token| {
        let (function, run) = (Function::Silu, RunExperts::Grouped);
        Layer::Experts(Experts { size, hidden: 4, experts: 3, per_token, function, shared: 0, run })
    };
    let attention = || Attention { size: 8, heads: 2, ..Attention::default() };
    let cross = |slot: &str| Layer::Attention(Attention { reads: Some(slot.to_owned()), ..attention() });
    let text = |size| {
        let (slot, sizes) = ("text".to_owned(), vec![3, size]);
        Layer::Provide { slot, sizes, integers: false, is_next: false, layers: vec![] }
    };
    let rotated = Layer::Attention(Attention { rotates: true, rotated: 5, ..attention() });
    let relative = Layer::Attention(Attention { relative: true, ..attention() });
    let pair = || Layer::EncoderDecoder { encoder: vec![], decoder: vec![] };
    for (layers, expected) in [
        (vec![experts(9, 2)], "0`: expects an input of shape (…, …, 9) and gets (2, 5, 8)"),
        (vec![experts(8, 0)], "0`: a token cannot pass through 0 of 3 experts"),
        (vec![experts(8, 4)], "0`: a token cannot pass through 4 of 3 experts"),
        (vec![cross("text")], "0`: no layer before it leaves `text`"),
        (vec![text(7), cross("text")], "1`: expects an input of shape (2, …, 8) and gets (2, 3, 7)"),
        (vec![rotated], "0`: heads of 4 cannot rotate 5 elements"),
        (
            vec![Layer::Positions { rows: 4, size: 8, is_fixed: false }],
            "0`: expects an input of shape (…, 4 or less, 8) and gets (2, 5, 8)",
        ),
        (vec![cross("encoder")], "0`: no layer before it leaves `encoder`"),
        (vec![relative], "0`: no layer before it has a table of position biases"),
        (vec![pair()], "0`: a decoder needs target tokens"),
    ] {
        assert_eq!(message(layers, tokens()), format!("layer `{expected}"));
    }
    let normed = Layer::Attention(Attention { head_size: 3, norm: HeadNorm::Rms, ..attention() });
    let both = model([pair()], Input::Pair { source: 4, target: 3 });
    for fitting in [model([text(8), cross("text")], tokens()), model([normed], tokens()), both] {
        assert!(Step::inference(2).estimate(&fitting).is_ok(), "{fitting:?}");
    }
}

/// The depth of hostile values.
const DEEP: usize = 100_000;

#[test]
fn hostile_texts_are_errors() {
    let unknown = Model::from_json(r#"{"name": "", "input": {"tokens": 1}, "layers": [{"name": "a", "type": "b"}]}"#);
    let expected = "this is not a model: layer `a` (`layers[0]`): unknown variant `b`, expected one of `sequential`, ";
    let read = unknown.unwrap_err().to_string();
    assert!(read.starts_with(expected), "{read}");
    let open = r#"{"name":"a","type":"sequential","layers":["#.repeat(DEEP);
    assert!(Model::from_json(&format!(r#"{{"name": "", "input": {{"tokens": 1}}, "layers": [{open}"#)).is_err());
    assert!(Model::from_json(r#"{"name": "", "input": {"tokens": -1}, "layers": []}"#).is_err());
    let (dots, start) = (".a".repeat(DEEP), "name = \"a\"\nlayers = []\ninput = ");
    for toml in [
        format!("layers = {}", "[".repeat(DEEP)),
        format!("layers = {}{}", "[".repeat(DEEP), "]".repeat(DEEP)),
        format!("layers = {}{}", "{a=".repeat(DEEP), "}".repeat(DEEP)),
        format!("a{dots} = 1"),
        format!("[a{dots}]"),
        format!("[[a{dots}]]"),
        format!("{start}{{ tokens{dots} = 1 }}"),
        format!("{start}{{ tokens = 1{} }}", "0".repeat(DEEP)),
        format!("{start}{{ tokens = -1 }}"),
    ] {
        let message = Model::from_toml(&toml).unwrap_err().to_string();
        assert!(message.starts_with("this is not a model: "), "{message}");
    }
}
